"""A repository of the Hugging Face hub at one commit, which huggingface_hub downloads into its own cache.

What the library (2.4) does, measured on a loopback server: it downloads eight files at a time. A connection
that is closed or silent is tried again, and the file goes on where it stopped; a reset one ends the run.
The next run keeps the files that are whole, and begins again the one that was in transfer: after ``kill -9``
its part stays in the cache as ``*.incomplete``, which nothing uses, until ``hf cache prune``. The library
compares sizes and no digests while it downloads; here its function for digests is called afterwards.

Xet is switched off (measured with hf_xet 1.8): Ctrl-C waits until the file is whole, a server that is down is
a RuntimeError of no further type after 110 s, and damaged bytes pass.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanbuild.hub.errors import ROOM, explained, not_a_hub
from wanbuild.staging import check_free_space
from wanrun.console import Progress
from wanrun.errors import SourceError
from wanrun.files import replace_file

if TYPE_CHECKING:
    from tqdm import tqdm


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit, in the hub's cache as far as it was needed so far.

    Args:
        id: the repository, ``owner/name``.
        name: id and revision, for messages.
        folder: its folder in the cache, named by the commit, in the repository's layout.
        files: size in bytes by name, of every file of the commit.
        offline: whether the cache alone is used.
    """

    id: str
    name: str
    folder: Path
    files: Mapping[str, int]
    offline: bool

    @property
    def commit(self) -> str:
        """40 hexadecimal digits."""
        return self.folder.name

    def fetch(self, names: Iterable[str], report: Callable[[str], object] | None = None) -> None:
        """Makes sure that these files are in the folder. Downloads no others.

        Args:
            names: relative to the repository.
            report: for large files; takes a line that says what is being done. Then the room on the disk is
                checked first, progress is shown, and new files are hashed.

        Raises:
            SourceError: if the repository, or in offline mode the cache, lacks a file; the disk has too
                little room; a download fails; a file arrives damaged; or one in the cache is cut off.
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
                report(f"downloading {len(new)} files, {sum(new.values()) / 1e9:.3f} GB, of {self.name}")
                with Progress(sum(new.values()), "download", unit="B") as progress:
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
        """Bytes by name of the files that are not cached; raises SourceError if there is no room for them."""
        from huggingface_hub import constants

        new = {
            item.filename: self.files[item.filename]
            for item in _download(self, names, dry_run=True)
            if item.will_download
        }
        limit = constants.MAX_HTTP_DOWNLOAD_SIZE
        if (large := max(new, key=new.__getitem__, default="")) and new[large] > limit:
            raise SourceError(
                f"{large} of {self.name} is too large to be downloaded without Xet",
                expected=f"at most {limit / 1e9:.0f} GB",
                found=f"{new[large] / 1e9:.1f} GB",
                remedy=f"run: hf download {self.id} --local-dir FOLDER   and give FOLDER as the source",
            )
        try:
            check_free_space(Path(constants.HF_HUB_CACHE), sum(new.values()))
        except SourceError as error:
            raise SourceError(error.what, expected=error.expected, found=error.found, remedy=ROOM) from None
        return new


def open_snapshot(repository: str, revision: str) -> Snapshot:
    """Asks the hub, or in offline mode its cache, which commit a revision is and what files it has.

    Raises:
        SourceError: if there is no such repository or revision, access is refused, or the hub cannot be
            reached; in offline mode, if the commit's list of files is not cached.
    """
    from huggingface_hub import HfApi, constants, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, RevisionResolutionError
    from huggingface_hub.file_download import repo_folder_name

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
    try:
        with explained(repository, revision):
            # With a limit on the wait, which snapshot_download's own request lacks.
            info = HfApi().model_info(
                repository, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
        commit = str(info.sha)
        files = {file.rfilename: file.size for file in info.siblings or () if file.size is not None}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise not_a_hub() from error
    if not re.fullmatch("[0-9a-f]{40}", commit):
        raise not_a_hub()
    if revision != commit:
        with contextlib.suppress(OSError):  # a cache that cannot be written may still hold everything
            ref = storage / "refs" / revision  # where the library looks revisions up in offline mode
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
    """Calls snapshot_download in a thread, so that Ctrl-C arrives here and can stop the library's threads.

    They stop when their next 10 MiB have arrived, or when their connection has been silent for 10 s.

    Returns:
        The list of what would be downloaded for a dry run, else the folder.
    """
    from huggingface_hub import snapshot_download

    stop = threading.Event()
    with explained(snapshot.id, snapshot.commit), _settings(stop), ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            snapshot_download,
            snapshot.id,
            revision=snapshot.commit,
            allow_patterns=sorted(names),
            tqdm_class=_bar(advance, stop),
            dry_run=dry_run,
        )
        try:
            return future.result()
        except BaseException:
            stop.set()
            raise


def _compare_digests(snapshot: Snapshot, names: Container[str]) -> None:
    """Removes the files whose digest is not the hub's; raises SourceError if there are any."""
    from huggingface_hub import HfApi

    with explained(snapshot.id, snapshot.commit):
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
    """The user has interrupted the download."""


class _Log(logging.Handler):
    """Prints a warning of the library as one line, such as the one before it tries a connection again."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self._stop = stop

    def emit(self, record: logging.LogRecord) -> None:
        if self._stop.is_set():
            raise _Stopped  # instead of five more attempts of 10 s each
        print("warning:", " ".join(record.getMessage().split()), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _settings(stop: threading.Event) -> Iterator[None]:
    """While it lasts, huggingface_hub's warnings look like ours, and it does not use Xet."""
    import huggingface_hub.file_download  # noqa: F401  the import sets its handlers up
    from huggingface_hub import constants

    log = logging.getLogger("huggingface_hub")
    before = log.handlers, constants.HF_HUB_DISABLE_XET
    log.handlers, constants.HF_HUB_DISABLE_XET = [_Log(stop)], True
    try:
        yield
    finally:
        log.handlers, constants.HF_HUB_DISABLE_XET = before


def _bar(advance: Callable[[int], None] | None, stop: threading.Event) -> type[tqdm[Any]]:
    """A class for the library's bars that draws nothing, counts bytes and ends an interrupted download.

    The library makes three bars: of files, of bytes received, and of bytes written, which has the name below.
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
