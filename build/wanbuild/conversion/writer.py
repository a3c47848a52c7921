"""Writes a component: source tensors are read, cast, checksummed and written block by block.

The unit of work is one source tensor (or all small tensors of one chunk file), so threads share a component
and memory stays at a few blocks per thread, or a head of rows that are reordered. A block is read into one
buffer and cast into another, both small enough for the second-level cache, then checksummed there and
written. Nothing is fsynced here: the building folder becomes durable as a whole, before it gets its name
(``wanbuild.staging.commit``).
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from crc32c import crc32c

from wanbuild.conversion.direct import DirectFile, WriteBuffer
from wanbuild.conversion.orbax import metadata_files, plan_layout
from wanbuild.conversion.quantise import Quantiser
from wanbuild.conversion.tensor import Tensor, TensorSource
from wanbuild.lora.deltas import Delta
from wanbuild.mapping.engine import Assignment
from wanbuild.mapping.rules import PERMUTING
from wanrun import EIGHT_BITS
from wanrun.artifact.layout import CRC_BYTES, ArrayLayout, array_folder
from wanrun.artifact.manifest import Component
from wanrun.artifact.parameters import Parameter

BLOCK_ITEMS = 128 * 2**10
"""Items cast at a time: 512 KiB of float32 and 256 KiB of bfloat16."""

PERMUTED_AT_ONCE = 2
"""Tensors that may be in memory as a whole, permuted copy at a time, for any number of threads."""


@dataclass(frozen=True)
class WrittenComponent:
    """A written component: its record, and the crc32c of every source tensor read for it.

    ``lost`` has, by path and row of each weight of 8 bits, the relative error of its rounding.
    """

    component: Component
    source_crc32c: Mapping[str, str]
    lost: Mapping[tuple[str, int], float]


@dataclass(frozen=True)
class WritePiece:
    """A part of the work for one thread, which reads ``nbytes`` source bytes."""

    nbytes: int
    run: Callable[[], None]


@dataclass(frozen=True)
class _Row:
    crc32c: str
    sha256: bytes


class _Buffers(threading.local):
    """A thread's buffers, for read bytes and for bytes to write."""

    def __init__(self) -> None:
        self.read = np.empty(4 * BLOCK_ITEMS, np.uint8)
        self.write = WriteBuffer()
        self.quantiser = Quantiser(BLOCK_ITEMS)


def component_layouts(assignments: Sequence[Assignment]) -> dict[str, ArrayLayout]:
    """Returns the layout of every parameter."""
    whole = [*assignments, *_scales_of(assignments)]
    return {item.path: plan_layout(item.shape, item.dtype.name, item.stacked) for item in whole}


def _scale_path(item: Assignment) -> str:
    return item.path.removesuffix("weight") + "scale"


def _scales_of(assignments: Sequence[Assignment]) -> Iterator[Assignment]:
    """Yields the scales of weights of 8 bits: parameters that no source tensor fills."""
    for item in assignments:
        if item.form:
            own = EIGHT_BITS[item.form]
            shape, dtype = own.scale_shape(item.shape), np.dtype(own.scale_dtype)
            yield Assignment(_scale_path(item), shape, dtype, item.axes[: len(shape)], ())


@dataclass
class _Work:
    """The state shared by one component's pieces: rows by path and chunk, scales to write by path and row."""

    rows: dict[tuple[str, int], list[_Row]] = field(default_factory=dict)
    source_crc32c: dict[str, str] = field(default_factory=dict)
    scales: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    taking_scales: threading.Lock = field(default_factory=threading.Lock)
    lost: dict[tuple[str, int], float] = field(default_factory=dict)


class ComponentWriter:
    """Writes one component's checkpoint: run every piece of ``pieces``, in any order, then ``finish``.

    ``folder`` is created. ``deltas`` are added to source tensors, by key. ``on_bytes`` is called with the
    source bytes of each written row; it may raise to stop.
    """

    def __init__(
        self,
        folder: Path,
        assignments: Sequence[Assignment],
        source: TensorSource,
        deltas: Mapping[str, Delta] = MappingProxyType({}),
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._folder, self._assignments = folder, assignments
        self._source, self._deltas, self._on_bytes = source, deltas, on_bytes
        self._layouts = component_layouts(assignments)
        self._buffers = _Buffers()
        self._permuting = threading.BoundedSemaphore(PERMUTED_AT_ONCE)
        self._work = _Work()

    def pieces(self) -> list[WritePiece]:
        """Creates the folders and returns the work, one piece per source tensor or small chunk file.

        A piece's ``run`` raises SourceError if a source tensor has a value that is not finite or cannot be
        read, and OSError if a file cannot be written.
        """
        pieces = []
        for path in self._layouts:
            (self._folder / array_folder(path)).mkdir(parents=True)
        for item in self._assignments:
            layout = self._layouts[item.path]
            # One piece per layer file; each source tensor is read by one piece, in order.
            step = 1 if item.stacked else layout.chunks
            for first in range(0, layout.chunks, step):
                pieces.append(self._piece(item, layout, range(first, first + step)))
        return pieces

    def finish(self) -> WrittenComponent:
        """Writes the checkpoint's metadata; every piece must have run."""
        for name, content in metadata_files(self._layouts).items():
            (self._folder / name).write_bytes(content)
        parameters = {}
        axes = {item.path: item.axes for item in (*self._assignments, *_scales_of(self._assignments))}
        for path, layout in sorted(self._layouts.items()):
            rows = [row for chunk in range(layout.chunks) for row in self._work.rows[path, chunk]]
            parameters[path] = Parameter(
                layout=layout,
                axes=axes[path],
                crc32c=tuple(row.crc32c for row in rows),
                sha256=hashlib.sha256(b"".join(row.sha256 for row in rows)).hexdigest(),
            )
        record = Component(f"weights/{self._folder.name}", parameters)
        return WrittenComponent(record, self._work.source_crc32c, self._work.lost)

    def _write_scales(self, item: Assignment, row: int) -> None:
        """Writes a chunk file of scales once those of all its rows are known."""
        path = _scale_path(item)
        layout = self._layouts[path]
        chunk = row // layout.rows_per_chunk
        rows = [(path, chunk * layout.rows_per_chunk + index) for index in range(layout.rows_per_chunk)]
        with self._work.taking_scales:
            if not self._work.scales.keys() >= set(rows):
                return
            scales = [self._work.scales.pop(one) for one in rows]
        with self._chunk_file(path, layout, chunk) as sums:
            for one in scales:
                sums.append(one.reshape(-1).view(np.uint8))
                sums.end_row()

    @contextmanager
    def _chunk_file(self, path: str, layout: ArrayLayout, chunk: int) -> Iterator[_Sums]:
        """Opens a parameter's chunk file; at the end writes its checksum and keeps those of its rows."""
        place = self._folder / array_folder(path) / layout.chunk_file(chunk)
        place.parent.mkdir(parents=True, exist_ok=True)
        with DirectFile(place, layout.chunk_bytes, self._buffers.write) as file:
            sums = _Sums(file)
            yield sums
            file.append(sums.trailer)
        self._work.rows[path, chunk] = sums.rows

    def _piece(self, item: Assignment, layout: ArrayLayout, chunks: range) -> WritePiece:
        rows = range(chunks.start * layout.rows_per_chunk, chunks.stop * layout.rows_per_chunk)
        fills = [item.fills[row] for row in rows] if item.stacked else item.fills
        nbytes = sum(self._source.entry(fill.key).nbytes for fill in fills)
        permuting = any(fill.transform in PERMUTING for fill in fills)

        def run() -> None:
            if permuting:
                with self._permuting:
                    self._write_files(item, layout, chunks)
            else:
                self._write_files(item, layout, chunks)

        return WritePiece(nbytes, run)

    def _write_files(self, item: Assignment, layout: ArrayLayout, chunks: range) -> None:
        """Writes these chunk files of a parameter; reads each source tensor once, from start to end."""
        row_items = math.prod(layout.row_shape)
        tensor: Tensor | None = None
        for chunk in chunks:
            rows = range(chunk * layout.rows_per_chunk, (chunk + 1) * layout.rows_per_chunk)
            with self._chunk_file(item.path, layout, chunk) as sums:
                for row in rows:
                    if tensor is None:
                        fill = item.fills[row if item.stacked else 0]
                        delta = self._deltas.get(fill.key)
                        tensor = Tensor(fill, self._source, delta, self._folder.name, item.form)
                    start = 0 if item.stacked else row * row_items
                    if item.form:
                        self._write_rounded(item, row, tensor, sums)
                    else:
                        self._write_row(tensor, start, row_items, item.dtype, sums)
                    sums.end_row()
                    self._on_bytes(row_items * tensor.itemsize)
                    if item.stacked or row == layout.rows - 1:
                        self._work.source_crc32c[tensor.key] = f"{tensor.crc32c:08x}"
                        tensor = None
            if item.form:  # when the thread's buffer is free again
                for row in rows:
                    self._write_scales(item, row)

    def _write_row(self, tensor: Tensor, start: int, count: int, dtype: np.dtype[Any], sums: _Sums) -> None:
        """Appends ``count`` items of the tensor, from ``start`` on, cast to the stored dtype."""
        stop = start + count
        while start < stop:
            block = sums.file.space(min(stop - start, BLOCK_ITEMS), dtype)
            tensor.cast(start, block, self._buffers.read)
            sums.filled(block)
            start += block.size

    def _write_rounded(self, item: Assignment, row: int, tensor: Tensor, sums: _Sums) -> None:
        """Appends a layer's weight of 8 bits; keeps its scales and the rounding error."""
        outputs, inputs = item.shape[-2:]
        count, lost = BLOCK_ITEMS // inputs, np.zeros(2)
        own = EIGHT_BITS[item.form]
        scales = np.empty(own.scale_shape(item.shape[1:]), own.scale_dtype)
        for first in range(0, outputs, count):
            shape = min(count, outputs - first), inputs
            rows = tensor.quantised(first * inputs, shape, self._buffers.read, self._buffers.quantiser)
            sums.append(rows.stored.reshape(-1))
            scales[first : first + count] = rows.scales
            lost += rows.lost
        self._work.scales[_scale_path(item), row] = scales
        self._work.lost[item.path, row] = float(np.sqrt(lost[0] / lost[1])) if lost[1] else 0.0


class _Sums:
    """The checksums of a chunk file's rows and of all of them, which are equal for a single row."""

    def __init__(self, file: DirectFile) -> None:
        self.file, self.rows = file, list[_Row]()
        self._sha, self._row, self._whole = hashlib.sha256(), 0, 0

    def filled(self, block: np.ndarray) -> None:
        """Counts and writes a block of the file's own buffer."""
        data = block.view(np.uint8).data
        self._row = crc32c(data, self._row)
        if self.rows:
            self._whole = crc32c(data, self._whole)
        self._sha.update(data)
        self.file.advance(data.nbytes)

    def append(self, data: np.ndarray) -> None:
        """Writes bytes from elsewhere, uint8 (bytes,)."""
        while data.size:
            block = self.file.space(data.size, data.dtype)
            block[...] = data[: block.size]
            self.filled(block)
            data = data[block.size :]

    def end_row(self) -> None:
        """Ends a row."""
        if not self.rows:
            self._whole = self._row
        self.rows.append(_Row(f"{self._row:08x}", self._sha.digest()))
        self._sha, self._row = hashlib.sha256(), 0

    @property
    def trailer(self) -> bytes:
        """The chunk's own checksum."""
        return self._whole.to_bytes(CRC_BYTES, "little")
