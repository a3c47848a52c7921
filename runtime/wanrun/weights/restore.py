"""Restores a component: threads read chunk files in parallel, directly into their final place.

Each block of a chunk file is checksummed while it is still in the CPU cache.
"""

from __future__ import annotations

__all__ = ["REBUILD", "Restore"]

import contextlib
import hashlib
import json
import os
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from crc32c import crc32c

from wanrun.artifact.layout import ALIGNMENT, CRC_BYTES, ArrayLayout, array_folder, zarr_metadata
from wanrun.artifact.manifest import Component
from wanrun.artifact.parameters import Parameter, Tree, nest
from wanrun.errors import ArtifactError
from wanrun.files import check_digest, open_regular, read_bounded, sha256_of
from wanrun.machine.environment import usable_cores
from wanrun.timing.clock import now
from wanrun.timing.floors import fastest
from wanrun.weights.buffers import Memory

BLOCK_BYTES = 512 * 2**10
"""Bytes per read and checksum: small enough that the checksum reads from the second-level cache."""

MAX_METADATA_BYTES = 2**20
"""The largest zarr.json, in bytes; real ones have some hundreds."""

REBUILD = "copy the artifact again or rebuild it with wanbuild convert --force"


def default_threads() -> int:
    """Returns the number of reading threads: one per core, at least 4, since reads wait for the storage more
    than they compute."""
    return max(4, usable_cores())


@dataclass(frozen=True)
class _Chunk:
    """One chunk file, the rows of its parameter that are read from it, and their destination."""

    name: str
    file: Path
    parameter: Parameter
    index: int
    rows: Sequence[int]
    destination: memoryview


class _NotAChunkError(ArtifactError):
    """The chunk file is missing or has the wrong size: the array may have been saved in another form."""


def _damage(
    chunk: _Chunk, what: str, expected: object, found: object, kind: type[ArtifactError] = ArtifactError
) -> ArtifactError:
    return kind(
        "damaged",
        f"weights are damaged: {chunk.name}, {what} in {chunk.file}",
        expected=expected,
        found=found,
        remedy=REBUILD,
    )


def _saved_again(folder: Path, layout: ArrayLayout) -> Path | None:
    """Returns the sign that another program, as Orbax, saved an array of this checkpoint again."""
    for trace in (folder / ".zarray", folder.parent / "manifest.ocdbt", folder.parent / "state"):
        if trace.exists():
            return trace
    metadata = folder / "zarr.json"
    try:
        ours = json.loads(read_bounded(metadata, MAX_METADATA_BYTES)) == zarr_metadata(layout)
    except (OSError, ValueError, RecursionError):  # missing or damaged, as its chunk file may be
        return None
    return None if ours else metadata


def _read_exactly(
    descriptor: int, target: memoryview, offset: int, chunk: _Chunk, direct: int | None
) -> None:
    """Fills a part of memory; whole pages past the page cache, if there is a descriptor for that."""
    done = 0
    if direct is not None and not (offset % ALIGNMENT or len(target) % ALIGNMENT):
        with contextlib.suppress(OSError):  # a file system may accept the flag and refuse the read
            done = os.preadv(direct, [target], offset)
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise _damage(chunk, "the file is truncated", chunk.parameter.layout.chunk_bytes, offset + done)
        done += count


def _read_chunk(chunk: _Chunk, verify: str, direct: bool) -> list[bytes]:
    """Reads and verifies one chunk file; returns the sha256 digest of each row if verify is 'sha256'."""
    try:
        file = open_regular(chunk.file)
    except OSError as error:
        what = f"the file cannot be read ({error.strerror})"
        raise _damage(chunk, what, "a chunk file", "none", _NotAChunkError) from None
    with file, _direct(chunk.file, direct) as past_cache:
        return _verified(chunk, file.fileno(), verify, past_cache)


@contextlib.contextmanager
def _direct(file: Path, wanted: bool) -> Iterator[int | None]:
    """Opens a file for reads past the page cache; None if they are not wanted, or not to be had."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT) if wanted else None
    except OSError:
        descriptor = None  # tmpfs, for example, has none
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _verified(chunk: _Chunk, descriptor: int, verify: str, direct: int | None) -> list[bytes]:
    """Reads and verifies an open chunk file."""
    layout = chunk.parameter.layout
    first_row = chunk.index * layout.rows_per_chunk
    digests: list[bytes] = []
    try:
        size = os.fstat(descriptor).st_size
        if size != layout.chunk_bytes + CRC_BYTES:
            expected_size = layout.chunk_bytes + CRC_BYTES
            raise _damage(chunk, "the file has the wrong size", expected_size, size, _NotAChunkError)
        whole = checksum = 0
        for place, row in enumerate(chunk.rows):
            checksum, target = 0, chunk.destination[place * layout.row_bytes : (place + 1) * layout.row_bytes]
            sha = hashlib.sha256() if verify == "sha256" else None
            for offset in range(0, layout.row_bytes, BLOCK_BYTES):
                block = target[offset : offset + BLOCK_BYTES]
                _read_exactly(descriptor, block, (row - first_row) * layout.row_bytes + offset, chunk, direct)
                checksum = crc32c(block, checksum)
                if layout.rows_per_chunk > 1:
                    whole = crc32c(block, whole)
                if sha is not None:
                    sha.update(block)
            found, expected = f"{checksum:08x}", chunk.parameter.crc32c[row]
            if found != expected:
                raise _damage(chunk, f"row {row} has the wrong crc32c", expected, found)
            if sha is not None:
                digests.append(sha.digest())
        if layout.rows_per_chunk == 1:
            whole = checksum
        trailer = int.from_bytes(os.pread(descriptor, CRC_BYTES, layout.chunk_bytes), "little")
        if len(chunk.rows) == layout.rows_per_chunk and trailer != whole:
            raise _damage(chunk, "the file's own crc32c is wrong", f"{whole:08x}", f"{trailer:08x}")
    except OSError as error:  # I/O error
        raise _damage(chunk, f"reading failed ({error.strerror})", "a chunk file", "an error") from None
    return digests


class Restore:
    """Reads a component with a thread pool; ``result`` waits for it.

    Args:
        verify: 'fast' checks every row's crc32c; 'sha256' also the sha256 of every parameter that is read
            whole. Of one of which some rows are read, only their crc32c can be checked.
        weights: a folder that holds the components instead of the artifact's ``weights`` folder.
        memory: the destination, if it is allocated already; for the same rows.
        rows: by path, the rows to read of parameters that are not read whole: see ``Memory``.
        direct: whether files are read past the page cache, which is for what is read again and again and does
            not fit there.

    Attributes:
        nbytes: the bytes of all rows that are read.

    Raises:
        UsageError: if weights is no folder.
    """

    def __init__(
        self,
        artifact: Path,
        name: str,
        component: Component,
        pool: ThreadPoolExecutor,
        verify: Literal["fast", "sha256"] = "fast",
        weights: str | None = None,
        memory: Memory | None = None,
        rows: Mapping[str, Sequence[int]] = MappingProxyType({}),
        direct: bool = False,
    ) -> None:
        self.name, self._component, self._verify = name, component, verify
        parameters = sorted(component.parameters.items())
        self._direct, self.started_at = direct, now()
        self._root = artifact / component.folder
        if weights is not None:
            from wanrun.opened.policy import weights_folder

            self._root = weights_folder(weights) / component.folder.removeprefix("weights/")
        if memory is None:
            memory = Memory(component, rows)
            memory.touch_ahead()
        self._memory = memory
        self._lock = threading.Lock()
        self._cancelled = False
        self._marks = list[tuple[float, int]]()  # when how many bytes had come
        self._rows = {
            path: range(one.layout.rows)
            if path not in rows
            else [row for row in rows[path] if row < one.layout.rows]
            for path, one in parameters
        }
        self.nbytes = sum(len(self._rows[path]) * one.layout.row_bytes for path, one in parameters)
        self._futures: dict[str, list[Future[list[bytes]]]] = {
            path: [
                pool.submit(self._read, path, parameter, index)
                for index in dict.fromkeys(row // parameter.layout.rows_per_chunk for row in self._rows[path])
            ]
            for path, parameter in parameters
        }

    def _read(self, path: str, parameter: Parameter, index: int) -> list[bytes]:
        """Reads one chunk; returns the sha256 digests of its rows if verify is 'sha256'."""
        with self._lock:
            if not self._marks:
                self.started_at = now()
                self._marks.append((self.started_at, 0))
        layout, rows = parameter.layout, self._rows[path]
        folder = self._root / array_folder(path)
        file = folder / layout.chunk_file(index)
        begin, end = (bisect_left(rows, (index + more) * layout.rows_per_chunk) for more in (0, 1))
        destination = self._memory.view(path, layout)[begin * layout.row_bytes : end * layout.row_bytes]
        chunk = _Chunk(f"{self.name}/{path}", file, parameter, index, rows[begin:end], destination)
        try:
            digests = _read_chunk(chunk, self._verify, self._direct)
        except _NotAChunkError:
            if (trace := _saved_again(folder, layout)) is None:
                raise
            raise ArtifactError(
                "other_release",
                f"the weights in {self._root} were saved again by another program",
                expected="the files that wanbuild wrote",
                found=trace,
                remedy=REBUILD,
            ) from None
        self._count(len(destination))
        return digests

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._marks.append((now(), self._marks[-1][1] + nbytes))

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes that are read, and all of them."""
        return self._marks[-1][1] if self._marks else 0, self.nbytes

    @property
    def ended_at(self) -> float | None:
        """When the last bytes had come, in seconds since the process started; None before that."""
        moment, done = self._marks[-1] if self._marks else (0.0, -1)
        return moment if done == self.nbytes else None

    @property
    def rate(self) -> float:
        """The bytes a second of the fastest quarter of the bytes; 0 before as many have come."""
        return fastest(self._marks, max(self.nbytes / 4, 1))

    def result(self, bits: bool = False) -> Tree:
        """Waits for all reads; returns the parameters as nested dicts of arrays in one memory block.

        Of a parameter that is not read whole, the array has the wanted rows along axis 0.

        Args:
            bits: whether floats of ``BITS`` are returned as integers of the same bits, as some programs take.

        Raises:
            ArtifactError: naming the parameter, if a file is missing or damaged.
            CancelledError: after ``cancel``.
        """
        try:
            arrays = {}
            for path, parameter in self._component.parameters.items():
                digests = [digest for future in self._futures[path] for digest in future.result()]
                whole = len(self._rows[path]) == parameter.layout.rows
                if self._verify == "sha256" and whole:
                    what = f"weights are damaged: {self.name}/{path}"
                    check_digest(sha256_of(b"".join(digests)), parameter.sha256, what, REBUILD)
                arrays[path] = self._memory.array(path, parameter.layout, bits)
            if self._cancelled:
                raise CancelledError
            self._memory.stop()  # the touching thread would keep it alive
            return nest(arrays)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancels queued reads."""
        for futures in self._futures.values():
            for future in futures:
                future.cancel()
        self._memory.stop()
        self._cancelled = True
