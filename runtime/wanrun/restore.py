"""Restores a component: chunk files are read in parallel straight into their final place.

Every parameter lies in one anonymous memory block per component, each at a 64-byte boundary, so that
the CPU backend aliases it and no second host copy is made. A block of a chunk file is checksummed while
it is still in cache.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from crc32c import crc32c

from wanrun.environment import usable_cores
from wanrun.errors import ArtifactError
from wanrun.layout import ALIGNMENT, CRC_BYTES, ArrayLayout, array_folder
from wanrun.manifest import Component, Parameter

BLOCK_BYTES = 512 * 2**10
"""Read and checksummed at a time: small enough that the checksum reads from the second-level cache."""

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float16": np.dtype("f2"),
}

VERIFY_MODES = ("fast", "sha256")

Tree = dict[str, Any]


def nest(flat: Mapping[str, Any]) -> Tree:
    """Nested dicts from paths joined with '/'."""
    tree: Tree = {}
    for path, value in flat.items():
        *parents, leaf = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = value
    return tree


def default_threads() -> int:
    """One thread a core, at least 4: reads wait for the storage more than they compute."""
    return max(4, usable_cores())


@dataclass(frozen=True)
class _Chunk:
    """One chunk file and the place of its bytes."""

    name: str
    file: Path
    parameter: Parameter
    index: int
    destination: memoryview


def _damage(chunk: _Chunk, what: str, expected: object, found: object) -> ArtifactError:
    return ArtifactError(
        f"weights are damaged: {chunk.name}, {what} in {chunk.file}",
        expected=expected,
        found=found,
        remedy="copy the artifact again or rebuild it with wanbuild convert --force",
    )


def _read_exactly(descriptor: int, target: memoryview, offset: int, chunk: _Chunk) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise _damage(chunk, "the file is truncated", chunk.parameter.layout.chunk_bytes, offset + done)
        done += count


def _read_chunk(chunk: _Chunk, verify: str) -> list[bytes]:
    """Reads and verifies one chunk file; returns the sha256 digest of each row if verify is 'sha256'."""
    layout = chunk.parameter.layout
    first_row = chunk.index * layout.rows_per_chunk
    digests: list[bytes] = []
    try:
        descriptor = os.open(chunk.file, os.O_RDONLY)
    except OSError as error:
        raise _damage(chunk, f"the file cannot be read ({error.strerror})", "a chunk file", "none") from None
    try:
        size = os.fstat(descriptor).st_size
        if size != layout.chunk_bytes + CRC_BYTES:
            raise _damage(chunk, "the file has the wrong size", layout.chunk_bytes + CRC_BYTES, size)
        whole = 0
        for row in range(layout.rows_per_chunk):
            checksum = 0
            start, end = row * layout.row_bytes, (row + 1) * layout.row_bytes
            sha = hashlib.sha256() if verify == "sha256" else None
            for offset in range(start, end, BLOCK_BYTES):
                block = chunk.destination[offset : min(offset + BLOCK_BYTES, end)]
                _read_exactly(descriptor, block, offset, chunk)
                checksum = crc32c(block, checksum)
                if layout.rows_per_chunk > 1:
                    whole = crc32c(block, whole)
                if sha is not None:
                    sha.update(block)
            found, expected = f"{checksum:08x}", chunk.parameter.crc32c[first_row + row]
            if found != expected:
                raise _damage(chunk, f"row {first_row + row} has the wrong crc32c", expected, found)
            if sha is not None:
                digests.append(sha.digest())
        if layout.rows_per_chunk == 1:
            whole = checksum
        trailer = int.from_bytes(os.pread(descriptor, CRC_BYTES, layout.chunk_bytes), "little")
        if trailer != whole:
            raise _damage(chunk, "the file's own crc32c is wrong", f"{whole:08x}", f"{trailer:08x}")
    except OSError as error:  # of the storage
        raise _damage(chunk, f"reading failed ({error.strerror})", "a chunk file", "an error") from None
    finally:
        os.close(descriptor)
    return digests


def _allocate(parameters: Iterable[tuple[str, Parameter]]) -> tuple[mmap.mmap, dict[str, int]]:
    """One anonymous block for all parameters and the offset of each."""
    offsets: dict[str, int] = {}
    total = 0
    for path, parameter in parameters:
        offsets[path] = total
        total += -(-parameter.layout.nbytes // ALIGNMENT) * ALIGNMENT
    block = mmap.mmap(-1, max(total, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # First touch of 4 KiB pages runs at 2 GB/s, of huge pages several times that.
        block.madvise(mmap.MADV_HUGEPAGE)
    return block, offsets


class Restore:
    """A component being read by a thread pool; ``result`` waits for it.

    Args:
        artifact: the artifact's folder.
        name: the component's name.
        component: its entry in the manifest.
        pool: threads to read with.
        verify: 'fast' checks every row's crc32c; 'sha256' every parameter's sha256 too.
        clock: tells the time for ``finished_at``.
    """

    finished_at: float
    """When the last chunk file was read, by the clock."""

    def __init__(
        self,
        artifact: Path,
        name: str,
        component: Component,
        pool: ThreadPoolExecutor,
        verify: str = "fast",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if verify not in VERIFY_MODES:
            raise ValueError(f"verify must be one of {VERIFY_MODES}, not {verify!r}")
        self.name, self._component, self._verify = name, component, verify
        parameters = sorted(component.parameters.items())
        self._clock, self.finished_at = clock, clock()
        self._block, self._offsets = _allocate(parameters)
        view = memoryview(self._block)
        root = artifact / component.folder
        self._futures: dict[str, list[Future[list[bytes]]]] = {}
        for path, parameter in parameters:
            layout, start = parameter.layout, self._offsets[path]
            folder = root / array_folder(path)
            self._futures[path] = [
                pool.submit(
                    self._read,
                    _Chunk(
                        f"{name}/{path}",
                        folder / layout.chunk_file(index),
                        parameter,
                        index,
                        view[start + index * layout.chunk_bytes : start + (index + 1) * layout.chunk_bytes],
                    ),
                )
                for index in range(layout.chunks)
            ]

    def _read(self, chunk: _Chunk) -> list[bytes]:
        digests = _read_chunk(chunk, self._verify)
        self.finished_at = self._clock()
        return digests

    def _array(self, path: str, layout: ArrayLayout, bits: bool) -> np.ndarray:
        dtype = np.dtype(np.uint16) if bits and layout.dtype == "bfloat16" else DTYPES[layout.dtype]
        count = layout.nbytes // dtype.itemsize
        return np.frombuffer(self._block, dtype, count, self._offsets[path]).reshape(layout.shape)

    def result(self, bits: bool = False) -> Tree:
        """Waits, and returns the parameters as nested dicts of arrays that share one memory block.

        Args:
            bits: whether bfloat16 arrays are returned as uint16 of the same bits, as programs may take them.

        Raises:
            ArtifactError: naming the parameter, if a file is missing or damaged.
        """
        try:
            arrays = {}
            for path, parameter in self._component.parameters.items():
                digests = [digest for future in self._futures[path] for digest in future.result()]
                if self._verify == "sha256":
                    found = hashlib.sha256(b"".join(digests)).hexdigest()
                    if found != parameter.sha256:
                        raise ArtifactError(
                            f"weights are damaged: {self.name}/{path}",
                            expected=f"sha256 {parameter.sha256}",
                            found=found,
                            remedy="copy the artifact again or rebuild it with wanbuild convert --force",
                        )
                arrays[path] = self._array(path, parameter.layout, bits)
            return nest(arrays)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Drops the reads that have not started."""
        for futures in self._futures.values():
            for future in futures:
                future.cancel()
