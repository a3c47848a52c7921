"""Downloads files of a repository on the Hugging Face hub into the hub's own cache, at one commit.

huggingface_hub does the talking, but for one thing: it drops a partial file when a process ends, and of a
checkpoint of 57 GB that may be all there is so far. So large files are kept as ``blobs/DIGEST.incomplete``
here, go on where they stopped, and are hashed while they arrive. Xet, which cannot go on either, is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import queue
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanbuild.hub.errors import hub_token, not_a_hub
from wanbuild.source.shards import find_weights
from wanbuild.staging import check_free_space
from wanrun.console import Progress
from wanrun.errors import SourceError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling
    from tqdm import tqdm

DOWNLOAD_THREADS = 8
"""Files that are downloaded at a time."""

MAX_HTTP_BYTES = 50_000_000_000
"""The hub serves no larger file over plain HTTP; published shards have 10 GB at most."""


@dataclass(frozen=True)
class _File:
    """A file as the hub lists it.

    Args:
        nbytes: its size.
        blob: its name in the cache; of a large file the sha256.
        large: whether git keeps it elsewhere (LFS): weights, and tokenizer.json.
    """

    nbytes: int
    blob: str
    large: bool


def _hex(value: Any, digits: int) -> str:
    """A digest from outside, which becomes a file name; raises ValueError if it is none."""
    if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{digits}}}", value):
        raise ValueError(f"not a digest: {value!r}")
    return value


def _as_file(listed: RepoSibling) -> _File:
    if type(listed.size) is not int or listed.size < 0:
        raise ValueError(f"no size: {listed.size!r}")
    blob = _hex(listed.lfs.sha256, 64) if listed.lfs else _hex(listed.blob_id, 40)
    return _File(listed.size, blob, listed.lfs is not None)


class RemoteRepository:
    """A repository of the hub at one commit: listed once, before any file is read.

    Args:
        repository: its id, ``owner/name``.
        revision: branch, tag or commit.
        report: takes a line that says what is downloaded.

    Raises:
        SourceError: if the answer is none of a hub. What huggingface_hub raises passes through.
    """

    def __init__(self, repository: str, revision: str, report: Callable[[str], object]) -> None:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        self._endpoint, self._token, self._report = constants.ENDPOINT, hub_token(), report
        try:
            info = self._model_info(repository, revision)
            self.commit = _hex(info.sha, 40)
            self._files = {file.rfilename: _as_file(file) for file in info.siblings or ()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise not_a_hub() from error
        self.id, self.name = repository, f"{repository} at {self.commit[:12]}"
        self._cache = Path(constants.HF_HUB_CACHE)
        self._storage = self._cache / repo_folder_name(repo_id=repository, repo_type="model")
        self.folder = self._storage / "snapshots" / self.commit
        self._wanted: set[str] = set()
        with contextlib.suppress(OSError):  # a cache that cannot be written may still hold everything
            self._remember(revision)

    def _model_info(self, repository: str, revision: str) -> ModelInfo:
        from huggingface_hub import HfApi, constants

        return HfApi(endpoint=self._endpoint, token=self._token or False).model_info(
            repository, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )

    def _remember(self, revision: str) -> None:
        """Notes which commit the revision is, as huggingface_hub does, for offline mode."""
        path = self._storage / "refs" / revision
        if revision != self.commit and ".." not in path.parts and not Path(revision).is_absolute():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            temporary.write_text(self.commit)
            temporary.replace(path)

    def holds(self, name: str) -> bool:
        """Whether the repository has a file of this name."""
        return name in self._files

    def find_weights(self, component: str, base: str, *, beside: bool, any_name: bool) -> str:
        """The weight file or index of a component: the rule for folders, applied to empty files.

        Args:
            component: the component's folder.
            base: the library's name for weights, from ``WEIGHT_NAMES``.
            beside: whether they may lie beside model_index.json.
            any_name: whether an only file may have any name.

        Raises:
            SourceError: as ``shards.find_weights``.
        """
        with tempfile.TemporaryDirectory() as temporary:
            root, folder = Path(temporary), Path(temporary, component)
            folder.mkdir()
            for name in self._files:
                parent, _, file = name.rpartition("/")
                if parent in ("", component) and re.fullmatch(r"[\w-][\w.-]{0,200}", file, re.ASCII):
                    (root / parent / file).touch()
            try:
                found = find_weights(folder, base, root if beside else None, any_name=any_name)
            except SourceError as error:
                what = error.what.replace(str(folder), f"{component} of {self.name}")
                raise SourceError(
                    what.replace(str(root), self.name),
                    expected=error.expected,
                    found=error.found,
                    remedy="use a repository or --revision with one set of safetensors files",
                ) from None
            return found.relative_to(root).as_posix()

    def fetch(self, names: Iterable[str], *, large: bool = False) -> None:
        """Downloads the files that are not cached.

        Args:
            names: relative to the repository.
            large: whether to look for room on the disk first, and to show progress.

        Raises:
            SourceError: if the repository lacks one, the disk has too little room, or one arrives damaged.
                What huggingface_hub raises passes through.
        """
        wanted = set(names)
        lacking = sorted(wanted - self._files.keys())
        if lacking:
            raise SourceError(f"{self.name} lacks {', '.join(lacking)}", remedy="use a complete repository")
        self._wanted |= wanted
        jobs: dict[str, list[str]] = {}  # by blob: files of the same content are one
        for name in sorted(wanted):
            if not (self.folder / name).exists():
                jobs.setdefault(self._files[name].blob, []).append(name)
        if not jobs:
            return
        (self._storage / "blobs").mkdir(parents=True, exist_ok=True)
        if not large:
            _in_threads(lambda job, stop: self._fetch_one(job, _ignore, stop), list(jobs.values()))
            return
        with self._announce(jobs) as progress:
            _in_threads(lambda job, stop: self._fetch_one(job, progress.advance, stop), list(jobs.values()))

    def _announce(self, jobs: Mapping[str, Sequence[str]]) -> Progress:
        """Checks sizes and the disk, says what is to come, and returns its progress in bytes."""
        files = {names[0]: self._files[names[0]] for names in jobs.values()}
        for name, file in files.items():
            if file.nbytes > MAX_HTTP_BYTES:
                raise SourceError(
                    f"{name} of {self.name} is too large to be downloaded here",
                    expected=f"at most {MAX_HTTP_BYTES / 1e9:.0f} GB",
                    found=f"{file.nbytes / 1e9:.1f} GB",
                    remedy=f"run: hf download {self.id} --local-dir FOLDER   and give FOLDER as the source",
                )
        paths = [(file.nbytes, self._blob(file), self._partial(file)) for file in files.values()]
        needed = sum(n - _size(partial) for n, blob, partial in paths if not blob.exists())
        try:
            check_free_space(self._cache, needed)
        except SourceError as error:
            remedy = "free some space, or set HF_HOME to a folder on another disk"
            raise SourceError(error.what, expected=error.expected, found=error.found, remedy=remedy) from None
        total = sum(file.nbytes for file in files.values())
        self._report(f"downloading {len(files)} files, {total / 1e9:.3f} GB, of {self.name}")
        return Progress(total, "download", unit="B")

    def _blob(self, file: _File) -> Path:
        return self._storage / "blobs" / file.blob

    def _partial(self, file: _File) -> Path:
        return self._storage / "blobs" / f"{file.blob}.incomplete"

    def _fetch_one(self, names: Sequence[str], advance: Callable[[int], None], stop: threading.Event) -> None:
        """Downloads one blob, and makes the files of the snapshot that are links to it."""
        from huggingface_hub import hf_hub_download

        file = self._files[names[0]]
        if file.large:
            self._fetch_blob(names[0], file, advance, stop)
        for name in names:
            hf_hub_download(
                self.id,
                name,
                revision=self.commit,
                endpoint=self._endpoint,
                token=self._token or False,
                cache_dir=self._cache,
                tqdm_class=_no_bar(),
            )
        if not file.large:
            advance(file.nbytes)

    def _fetch_blob(
        self, name: str, file: _File, advance: Callable[[int], None], stop: threading.Event
    ) -> None:
        from huggingface_hub.utils import WeakFileLock

        blob, partial = self._blob(file), self._partial(file)
        # The lock that huggingface_hub takes for this blob.
        lock = self._cache / ".locks" / self._storage.name / f"{file.blob}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if blob.exists():
                advance(file.nbytes)
                return
            if _size(partial) > file.nbytes:
                partial.unlink()
            with _Partial(partial, advance, stop) as sink:
                self._receive(name, file, sink)
                os.fsync(sink.fileno())
            if sink.digest() != file.blob:
                partial.unlink()
                raise SourceError(
                    f"{name} of {self.name} was damaged on the way",
                    expected=f"sha256 {file.blob}",
                    found=sink.digest(),
                    remedy="run it again; this file starts over",
                )
            partial.replace(blob)

    def _receive(self, name: str, file: _File, sink: _Partial) -> None:
        """Downloads from where the partial file ends."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError, HTTPError
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(self.id, name, revision=self.commit, endpoint=self._endpoint)
        headers = build_hf_headers(token=self._token or False)
        headers["Accept-Encoding"] = "identity"  # compressed bytes could not be continued
        while True:
            start = sink.seek(0, os.SEEK_END)
            try:
                http_get(
                    url,
                    sink,
                    resume_size=start,
                    headers=headers,
                    expected_size=file.nbytes,
                    tqdm_class=_no_bar(),
                )
                return
            except HTTPError as error:
                # A connection that was reset is not tried again there; it is worth it while bytes arrive.
                if isinstance(error, HfHubHTTPError) or sink.tell() <= start:
                    raise

    def check(self) -> None:
        """Raises SourceError unless every file fetched has the listed size, if it was cached before too."""
        for name in sorted(self._wanted):
            path, expected = self.folder / name, self._files[name].nbytes
            if _size(path) != expected:
                raise SourceError(
                    f"{name} of {self.name} is cut off in the hub's cache",
                    expected=f"{expected} bytes",
                    found=_size(path),
                    remedy=f"delete {path.resolve()} and run it again",
                )


class _Partial(io.FileIO):
    """A file that is appended to: counts and hashes what it holds, and stops a download that is given up."""

    def __init__(self, path: Path, advance: Callable[[int], None], stop: threading.Event) -> None:
        super().__init__(path, "ab+")
        self._advance, self._stop = advance, stop
        self.seek(0)
        self._hash: Any = hashlib.file_digest(self, "sha256")
        self._advance(self.seek(0, os.SEEK_END))

    def write(self, chunk: Any) -> int:
        if self._stop.is_set():
            raise _Stopped
        view = memoryview(chunk)
        while view:
            written = super().write(view)
            self._hash.update(view[:written])
            self._advance(written)
            view = view[written:]
        return len(chunk)

    def truncate(self, size: int | None = None) -> int:
        """Called where the server starts over instead of going on: empties the file."""
        self._advance(-os.fstat(self.fileno()).st_size)
        self._hash = hashlib.sha256()
        return super().truncate(0)

    def digest(self) -> str:
        """The sha256 of the whole file, in hexadecimal."""
        return str(self._hash.hexdigest())


class _Stopped(Exception):  # noqa: N818
    """Another file failed, or the user interrupted."""


def _in_threads(
    work: Callable[[Sequence[str], threading.Event], None], jobs: Sequence[Sequence[str]]
) -> None:
    """Does all jobs, or raises the first error and tells the other threads to stop.

    No executor: it waits for its threads even on Ctrl-C, and a stalled connection gives up after a minute.
    """
    pending: queue.SimpleQueue[Sequence[str]] = queue.SimpleQueue()
    outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    for job in jobs:
        pending.put(job)

    def run() -> None:
        with contextlib.suppress(queue.Empty):
            while not stop.is_set():
                job = pending.get_nowait()
                try:
                    work(job, stop)
                except BaseException as error:  # raised again by the caller's thread
                    outcomes.put(error)
                else:
                    outcomes.put(None)

    try:
        for _ in range(min(DOWNLOAD_THREADS, len(jobs))):
            threading.Thread(target=run, daemon=True).start()
        for _ in jobs:
            error = outcomes.get()
            if error is not None:
                raise error
    finally:
        stop.set()


def _ignore(nbytes: int) -> None:
    """Shows no progress."""


def _size(path: Path) -> int:
    """Size of a file in bytes, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def _no_bar() -> type[tqdm[Any]]:
    """A progress bar for huggingface_hub that shows nothing."""
    from tqdm import tqdm

    class NoBar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return NoBar
