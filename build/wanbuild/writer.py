"""Writes a component: source tensors are cast, checksummed and written block by block.

The unit of work is one source tensor (or all the small ones of one chunk file), so threads share a
component and memory stays at a few blocks a thread. A block is read from the mapping, cast into a buffer
that stays in the second-level cache, checksummed there and written. Nothing is fsynced here: the folder
being built becomes durable as a whole, before it gets its name (``wanbuild.staging.commit``).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from crc32c import crc32c

from wanbuild.mapping.engine import Assignment
from wanbuild.mapping.rules import TRANSFORMS
from wanrun.errors import SourceError
from wanrun.layout import (
    CHECKPOINT_METADATA,
    CRC_BYTES,
    ArrayLayout,
    array_folder,
    orbax_metadata,
    plan_layout,
    zarr_metadata,
)
from wanrun.manifest import Component, Parameter

BLOCK_ITEMS = 128 * 2**10
"""Items cast at a time: 512 KiB of float32 and 256 KiB of bfloat16."""


class TensorSource(Protocol):
    """Where source tensors come from."""

    def array(self, key: str) -> np.ndarray:
        """A read-only view of one tensor."""
        ...

    def drop(self, key: str) -> None:
        """Says that the tensor's pages are not needed again."""
        ...


@dataclass(frozen=True)
class WrittenComponent:
    """What was written, and the crc32c of every source tensor that was read for it."""

    component: Component
    source_crc32c: Mapping[str, str]


@dataclass(frozen=True)
class _Row:
    crc32c: str
    sha256: bytes


class _ChunkWriter:
    """Writes one chunk file row by row."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("wb", buffering=0)
        self._crc = 0
        self.rows: list[_Row] = []

    def write_row(self, blocks: Iterator[np.ndarray]) -> None:
        """Appends one row, given as contiguous blocks of the stored dtype."""
        sha, row_crc = hashlib.sha256(), 0
        for block in blocks:
            data = block.view(np.uint8).data
            row_crc, self._crc = crc32c(data, row_crc), crc32c(data, self._crc)
            sha.update(data)
            self._write(data)
        self.rows.append(_Row(f"{row_crc:08x}", sha.digest()))

    def _write(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Appends the chunk's crc32c, unless writing the chunk failed."""
        with self._file:
            if kind is None:
                self._write(memoryview(self._crc.to_bytes(CRC_BYTES, "little")))
                if hasattr(os, "posix_fadvise"):
                    # Linux starts to write the pages back and does not wait, so that little is left to do
                    # for the fsync at the end; dirty pages stay in the page cache.
                    os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class _Tensor:
    """One source tensor being cast and checksummed from front to back.

    A transform that permutes axes is made contiguous once; the others stay views of the mapping.
    """

    def __init__(self, key: str, source: np.ndarray, transform: str, dtype: np.dtype[Any]) -> None:
        self.key, self.nbytes = key, source.nbytes
        self._raw = source.reshape(-1)
        self._flat = np.ascontiguousarray(TRANSFORMS[transform](source)).reshape(-1)
        self._dtype = dtype
        self.crc32c = 0

    def blocks(self, start: int, stop: int, buffer: np.ndarray) -> Iterator[np.ndarray]:
        """Items start to stop in the stored dtype, in blocks that are valid until the next one."""
        for begin in range(start, stop, BLOCK_ITEMS):
            end = min(begin + BLOCK_ITEMS, stop)
            block = buffer[: end - begin]
            block[...] = self._flat[begin:end]
            self.crc32c = crc32c(self._raw[begin:end].view(np.uint8).data, self.crc32c)
            if not finite(block):
                raise SourceError(
                    f"{self.key} has a value that is not finite in {self._dtype}",
                    expected="finite weights",
                    found="NaN or infinity",
                    remedy="use an undamaged checkpoint",
                )
            yield block


def finite(block: np.ndarray) -> bool:
    """Whether every value is finite, by the exponent bits: a compare over integers is the cheapest test."""
    bits = 8 * block.dtype.itemsize
    mask = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[block.dtype.name]
    exponents = block.view(f"u{bits // 8}") & mask
    return bool(exponents.max(initial=0) != mask)


def component_layouts(assignments: Sequence[Assignment]) -> dict[str, ArrayLayout]:
    """Layout of every parameter."""
    return {item.path: plan_layout(item.shape, item.dtype.name, item.stacked) for item in assignments}


class ComponentWriter:
    """Writes one component's checkpoint.

    Args:
        folder: the checkpoint's folder, to be created.
        assignments: where every parameter comes from.
        source: the source tensors.
        on_bytes: told the source bytes of each tensor once it is done.
    """

    def __init__(
        self,
        folder: Path,
        assignments: Sequence[Assignment],
        source: TensorSource,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._folder, self._assignments, self._source = folder, assignments, source
        self._on_bytes = on_bytes
        self._layouts = component_layouts(assignments)
        self._local = threading.local()
        self._source_crc32c: dict[str, str] = {}

    def write(self, pool: ThreadPoolExecutor) -> WrittenComponent:
        """Writes every chunk file and the checkpoint's metadata.

        Raises:
            SourceError: if a source tensor has a value that is not finite.
        """
        futures = []
        for item in self._assignments:
            layout = self._layouts[item.path]
            folder = self._folder / array_folder(item.path)
            folder.mkdir(parents=True)
            (folder / "zarr.json").write_text(json.dumps(zarr_metadata(layout)))
            # A file per layer is a task per layer; a source tensor is read by one task, in order.
            step = 1 if item.stacked else layout.chunks
            futures += [
                (item.path, pool.submit(self._write_files, item, layout, range(first, first + step)))
                for first in range(0, layout.chunks, step)
            ]
        rows: dict[str, list[_Row]] = {}
        try:
            for path, future in futures:
                rows.setdefault(path, []).extend(future.result())
        except BaseException:
            for _, future in futures:
                future.cancel()
            raise
        self._write_metadata()
        parameters = {
            path: Parameter(
                self._layouts[path],
                tuple(row.crc32c for row in rows[path]),
                hashlib.sha256(b"".join(row.sha256 for row in rows[path])).hexdigest(),
            )
            for path in sorted(rows)
        }
        return WrittenComponent(Component(f"weights/{self._folder.name}", parameters), self._source_crc32c)

    def _write_metadata(self) -> None:
        (self._folder / "_METADATA").write_text(json.dumps(orbax_metadata(self._layouts)))
        (self._folder / "_CHECKPOINT_METADATA").write_text(json.dumps(CHECKPOINT_METADATA))

    def _write_files(self, item: Assignment, layout: ArrayLayout, chunks: range) -> list[_Row]:
        """Writes these chunk files of a parameter, reading each source tensor once; returns their rows."""
        row_items = math.prod(layout.row_shape)
        buffer = self._buffer(item.dtype)
        written: list[_Row] = []
        tensor: _Tensor | None = None
        for chunk in chunks:
            file = self._folder / array_folder(item.path) / layout.chunk_file(chunk)
            with _ChunkWriter(file) as writer:
                for row in range(chunk * layout.rows_per_chunk, (chunk + 1) * layout.rows_per_chunk):
                    if tensor is None:
                        tensor = self._open(item, row if item.stacked else 0)
                    start = 0 if item.stacked else row * row_items
                    writer.write_row(tensor.blocks(start, start + row_items, buffer))
                    if item.stacked or row == layout.rows - 1:
                        self._release(tensor)
                        tensor = None
            written += writer.rows
        return written

    def _buffer(self, dtype: np.dtype[Any]) -> np.ndarray:
        """This thread's buffer for blocks of a dtype."""
        buffers: dict[np.dtype[Any], np.ndarray] = self._local.__dict__.setdefault("buffers", {})
        return buffers.setdefault(dtype, np.empty(BLOCK_ITEMS, dtype))

    def _open(self, item: Assignment, index: int) -> _Tensor:
        fill = item.fills[index]
        return _Tensor(fill.key, self._source.array(fill.key), fill.transform, item.dtype)

    def _release(self, tensor: _Tensor) -> None:
        self._source_crc32c[tensor.key] = f"{tensor.crc32c:08x}"
        self._source.drop(tensor.key)
        self._on_bytes(tensor.nbytes)
