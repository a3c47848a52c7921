"""A Hugging Face hub repository at one commit, downloaded by huggingface_hub into its own cache.

The library downloads eight files at a time, compares their sizes, and takes a file up again after a closed or
silent connection; the next run keeps complete files. Xet is switched off (docs/notes/convert.md says why).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanbuild.hub.errors import explained
from wanbuild.progress_line import ProgressLine
from wanrun.errors import SourceError, UsageError, shortened
from wanrun.files import replace_file
from wanrun.undo import undone_at_exit
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

    Attributes:
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
        """Makes these files, and no others, available in the folder.

        With ``report`` it also shows progress, for large files. Raises SourceError if the repository, or in
        offline mode the cache, lacks a file; a download fails; or a cached file is cut off.
        """
        wanted = set(names)
        lacking = [name for name in sorted(wanted) if not self._has(name)]
        if lacking and self.offline:
            raise _not_cached(self.name, ", ".join(lacking))
        if lacking:
            raise SourceError(
                "missing_file", f"{self.name} lacks {', '.join(lacking)}", remedy="use a complete repository"
            )
        new = [self.files[name] for name in wanted if not (self.folder / name).is_file()]
        if report and new:
            report(f"downloading {len(new)} files, {in_bytes(sum(new))}, of {self.name}")
            with ProgressLine(sum(new), "download") as progress:
                _download(self, wanted, progress.advance)
        elif not self.offline:
            _download(self, wanted)
        for name in sorted(wanted):
            path = self.folder / name
            if (found := path.stat().st_size) != self.files[name]:
                raise SourceError(
                    "damaged",
                    f"{name} of {self.name} is cut off in the hub's cache",
                    expected=f"{self.files[name]} bytes",
                    found=found,
                    remedy=f"delete {path.resolve()} and run it again",
                )

    def _has(self, name: str) -> bool:
        return (self.folder / name).is_file() if self.offline else name in self.files


def open_snapshot(repository: str, revision: str) -> Snapshot:
    """Asks the hub, or in offline mode its cache, for a revision's commit and the commit's files.

    Raises UsageError for a malformed revision. Raises SourceError if there is no such repository or revision,
    access is refused, or the hub cannot be reached; in offline mode, if the commit's list of files is not
    cached.
    """
    from huggingface_hub import HfApi, constants, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, RevisionResolutionError
    from huggingface_hub.file_download import repo_folder_name

    if not _REVISION.fullmatch(revision):
        raise UsageError(
            "invalid_value",
            f"the revision {shortened(revision)} is malformed",
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
        "missing_file",
        f"the hub's cache lacks {what} of {name}, and offline mode is on",
        remedy="unset HF_HUB_OFFLINE to download it, or give a folder as the source",
    )


def _download(snapshot: Snapshot, names: set[str], advance: Callable[[int], None] | None = None) -> None:
    """Downloads those files that are not in the cache; ``advance`` gets the number of bytes that arrive."""
    from huggingface_hub import snapshot_download

    with explained(snapshot.id), _guarded(), undone_at_exit(_remove_parts):
        snapshot_download(
            snapshot.id, revision=snapshot.commit, allow_patterns=sorted(names), tqdm_class=_bar(advance)
        )


def _remove_parts() -> None:
    """Removes this process's partial downloads, which are never resumed."""
    with contextlib.suppress(OSError):  # not on Linux
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if (name := os.readlink(link)).endswith(".incomplete"):  # noqa: PTH115 - no path, if a socket
                    Path(name).unlink()


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Switches Xet off, and checks the headers that the library uses as file names in its cache."""
    from huggingface_hub import constants, file_download

    own, before = file_download.get_hf_file_metadata, constants.HF_HUB_DISABLE_XET

    def checked(*args: Any, **options: Any) -> Any:
        metadata = own(*args, **options)
        for header, value in (("ETag", metadata.etag), ("X-Repo-Commit", metadata.commit_hash)):
            if value is not None and not _FILE_NAME.fullmatch(value):
                raise ValueError(f"its header {header} is {value!r}, which would be a file's name")
        return metadata

    file_download.get_hf_file_metadata, constants.HF_HUB_DISABLE_XET = checked, True
    try:
        yield
    finally:
        file_download.get_hf_file_metadata, constants.HF_HUB_DISABLE_XET = own, before


def _bar(advance: Callable[[int], None] | None) -> type[tqdm[Any]]:
    """Returns a progress bar class that draws nothing, and passes the bytes written to ``advance``."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            self._counts = name == "huggingface_hub.snapshot_download"

        def update(self, n: float | None = 1) -> None:
            if advance is not None and self._counts:
                advance(int(n or 0))

    return Bar
