"""A Hugging Face hub repository at one commit, downloaded by huggingface_hub into its own cache.

The library's behaviour (2.4), measured on a loopback server: it downloads eight files at a time. After a
closed or silent connection it retries, and the file resumes where it stopped; a reset connection ends the
run. The next run keeps complete files and restarts the file in transfer: after ``kill -9`` the partial file
stays in the cache as ``*.incomplete``, unused, until ``hf cache prune``. While downloading, the library
compares sizes and no digests; this module calls its digest function afterwards.

Xet is switched off (measured with hf_xet 1.8): Ctrl-C waits until the file is complete, an unreachable server
gives a plain RuntimeError after 110 s, and damaged bytes pass.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanbuild.hub.errors import ROOM, explained
from wanbuild.progress import Progress
from wanbuild.staging import check_free_space
from wanrun.errors import SourceError, UsageError, shortened
from wanrun.files import replace_file
from wanrun.terminal.undo import undone_at_exit
from wanrun.units import in_bytes

if TYPE_CHECKING:
    from tqdm import tqdm


_FILE_NAME = re.compile(r"[\w+=:-][\w.+=:-]{0,199}", re.ASCII)
"""A header's value that names one file of the cache, and no other."""

_PART = r"[\w+=@-][\w.+=@-]{0,99}"
_REVISION = re.compile(rf"(?!.*\.\.){_PART}(?:/{_PART}){{0,9}}")
"""A git ref such as ``main`` or ``refs/pr/1``; its names are folders of the cache."""


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit, in the hub's cache as far as its files were needed.

    Args:
        id: the repository, ``owner/name``.
        name: id and revision, for messages.
        folder: the commit's folder in the cache, in the repository's layout.
        files: size in bytes of every file of the commit, by name.
        offline: whether only the cache is used.
    """

    id: str
    name: str
    folder: Path
    files: Mapping[str, int]
    offline: bool

    @property
    def commit(self) -> str:
        """The commit's 40 hexadecimal digits."""
        return self.folder.name

    def fetch(self, names: Iterable[str], report: Callable[[str], object] | None = None) -> None:
        """Makes these files available in the folder; downloads no others.

        Args:
            names: file names, relative to the repository.
            report: given for large files; receives a line that says what is done. Then free disk space is
                checked first, progress is shown, and new files are hashed.

        Raises:
            SourceError: if the repository, or in offline mode the cache, lacks a file; the disk has too
                little space; a download fails; a downloaded file is damaged; or a cached file is cut off.
        """
        wanted = set(names)
        lacking = [name for name in sorted(wanted) if not self._has(name)]
        if lacking and self.offline:
            raise _not_cached(self.name, ", ".join(lacking))
        if lacking:
            raise SourceError(f"{self.name} lacks {', '.join(lacking)}", remedy="use a complete repository")
        if not self.offline:
            new = self._new(wanted) if report else {}
            if report and new:
                report(f"downloading {len(new)} files, {in_bytes(sum(new.values()))}, of {self.name}")
                with Progress(sum(new.values()), "download") as progress:
                    _download(self, wanted, progress.advance)
                report("comparing their digests with the hub's")
                _compare_digests(self, new)
            else:
                _download(self, wanted)
        for name in sorted(wanted):
            path = self.folder / name
            if (found := path.stat().st_size) != self.files[name]:
                raise SourceError(
                    f"{name} of {self.name} is cut off in the hub's cache",
                    expected=f"{self.files[name]} bytes",
                    found=found,
                    remedy=f"delete {path.resolve()} and run it again",
                )

    def _has(self, name: str) -> bool:
        return (self.folder / name).is_file() if self.offline else name in self.files

    def _new(self, names: set[str]) -> dict[str, int]:
        """Returns the sizes of files that are not cached, by name; SourceError if the disk lacks space."""
        from huggingface_hub import constants

        items = _download(self, names, dry_run=True)
        new = {item.filename: self.files[item.filename] for item in items if item.will_download}
        try:
            check_free_space(Path(constants.HF_HUB_CACHE), sum(new.values()))
        except SourceError as error:
            raise SourceError(error.what, expected=error.expected, found=error.found, remedy=ROOM) from None
        return new


def open_snapshot(repository: str, revision: str) -> Snapshot:
    """Asks the hub, or in offline mode its cache, for a revision's commit and the commit's files.

    Raises:
        UsageError: if the revision has not the form of one.
        SourceError: if there is no such repository or revision, access is refused, or the hub cannot be
            reached; in offline mode, if the commit's list of files is not cached.
    """
    from huggingface_hub import HfApi, constants, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, RevisionResolutionError
    from huggingface_hub.file_download import repo_folder_name

    if not _REVISION.fullmatch(revision):
        raise UsageError(
            f"the revision {shortened(revision)} has not the form of one",
            expected="a branch, a tag or a commit of the repository",
            remedy="check --revision",
        )
    storage = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))
    if constants.HF_HUB_OFFLINE:
        name = f"{repository} at {revision}"
        try:
            found = HfApi().resolve_revision(repository, revision=revision, local_files_only=True)
            tree = get_cached_repo_tree(repository, revision=found)
        except (RevisionResolutionError, CachedRepoTreeNotFoundError):
            raise _not_cached(name, "the list of files") from None
        folder = storage / "snapshots" / found.resolved
        return Snapshot(repository, name, folder, {file.path: file.size for file in tree}, True)
    with explained(repository):
        # With a timeout, which snapshot_download's own request lacks.
        info = HfApi().model_info(
            repository, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        commit = str(info.sha)
        files = {file.rfilename: file.size for file in info.siblings or () if file.size is not None}
        if not re.fullmatch("[0-9a-f]{40}", commit):
            raise ValueError(f"{commit!r} is no commit")
    if revision != commit:
        with contextlib.suppress(OSError):  # a read-only cache may still hold everything
            ref = storage / "refs" / revision  # the library looks up revisions here in offline mode
            ref.parent.mkdir(parents=True, exist_ok=True)
            replace_file(ref, commit.encode())
    return Snapshot(
        repository, f"{repository} at {commit[:12]}", storage / "snapshots" / commit, files, False
    )


def _not_cached(name: str, what: str) -> SourceError:
    return SourceError(
        f"the hub's cache lacks {what} of {name}, and offline mode is on",
        remedy="unset HF_HUB_OFFLINE to download it, or give a folder as the source",
    )


def _download(
    snapshot: Snapshot,
    names: set[str],
    advance: Callable[[int], None] | None = None,
    *,
    dry_run: bool = False,
) -> Any:
    """Calls snapshot_download in a thread: an exception arrives here, and stops the library's threads.

    They stop after their next 10 MiB, or after 10 s on a silent connection, and remove their partial files. A
    command that a signal ends does not wait for that, and removes them itself.

    Returns:
        For a dry run, the list of files to download; otherwise the folder.
    """
    from huggingface_hub import snapshot_download

    stop = threading.Event()
    with explained(snapshot.id), _settings(), ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            snapshot_download,
            snapshot.id,
            revision=snapshot.commit,
            allow_patterns=sorted(names),
            tqdm_class=_bar(advance, stop),
            dry_run=dry_run,
        )
        try:
            with undone_at_exit(_remove_parts):
                return future.result()
        except BaseException:
            stop.set()
            raise


def _remove_parts() -> None:
    """Removes the files in transfer, which nobody would resume: this process has them open."""
    with contextlib.suppress(OSError):  # not on Linux
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if (name := os.readlink(link)).endswith(".incomplete"):  # noqa: PTH115 - no path, if a socket
                    Path(name).unlink()


def _compare_digests(snapshot: Snapshot, names: Container[str]) -> None:
    """Removes files whose digest differs from the hub's; raises SourceError if there are any."""
    from huggingface_hub import HfApi

    with explained(snapshot.id):
        found = HfApi().verify_repo_checksums(snapshot.id, revision=snapshot.commit).mismatches
    damaged = [item for item in found if item["path"] in names]
    for item in damaged:
        (snapshot.folder / item["path"]).resolve().unlink(missing_ok=True)
    if damaged:
        raise SourceError(
            f"{damaged[0]['path']} of {snapshot.name} was damaged on the way",
            expected=f"{damaged[0]['algorithm']} {damaged[0]['expected']}",
            found=damaged[0]["actual"],
            remedy="run it again; this file starts over",
        )


class _Stopped(Exception):  # noqa: N818
    """The user interrupted the download."""


class _Log(logging.Handler):
    """Prints the library's warnings as one line each, such as the warning before a retry."""

    def emit(self, record: logging.LogRecord) -> None:
        print("warning:", " ".join(record.getMessage().split()), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Sets huggingface_hub up while the context is open.

    Its warnings are formatted as this package's, Xet is off, and headers of which it makes the names of files
    in its cache are checked.
    """
    from huggingface_hub import constants, file_download  # the import sets its handlers up

    def checked(*args: Any, **options: Any) -> Any:
        metadata = own(*args, **options)
        for header, value in (("ETag", metadata.etag), ("X-Repo-Commit", metadata.commit_hash)):
            if value is not None and not _FILE_NAME.fullmatch(value):
                raise ValueError(f"its header {header} is {value!r}, which would be a file's name")
        return metadata

    log = logging.getLogger("huggingface_hub")
    before, own = (log.handlers, constants.HF_HUB_DISABLE_XET), file_download.get_hf_file_metadata
    log.handlers, constants.HF_HUB_DISABLE_XET = [_Log()], True
    file_download.get_hf_file_metadata = checked
    try:
        yield
    finally:
        log.handlers, constants.HF_HUB_DISABLE_XET = before
        file_download.get_hf_file_metadata = own


def _bar(advance: Callable[[int], None] | None, stop: threading.Event) -> type[tqdm[Any]]:
    """Returns a progress bar class that draws nothing, counts bytes and ends an interrupted download.

    The library makes three bars: files, bytes received, and bytes written, which has the name below.
    """
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            self._counts = name == "huggingface_hub.snapshot_download"

        def update(self, n: float | None = 1) -> None:
            if stop.is_set():
                raise _Stopped
            if advance is not None and self._counts:
                advance(int(n or 0))

    return Bar
