"""Writes a component: source tensors are read, cast, checksummed and written block by block.

The unit of work is one source tensor (or all small tensors of one chunk file), so threads share a component
and memory stays at a few blocks per thread. A block is read into one buffer and cast into another, both small
enough for the second-level cache, then checksummed there and written. Nothing is fsynced here: the building
folder becomes durable as a whole, before it gets its name (``wanbuild.staging.commit``).
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from crc32c import crc32c

from wanbuild.conversion.direct import DirectFile, WriteBuffer
from wanbuild.conversion.orbax import metadata_files, plan_layout
from wanbuild.lora.deltas import Delta
from wanbuild.mapping.engine import Assignment, Fill
from wanbuild.mapping.rules import PERMUTING, TRANSFORMS
from wanbuild.source.eight_bit import EightBit
from wanbuild.source.safetensors import TensorEntry
from wanrun.artifact.layout import CRC_BYTES, ArrayLayout, array_folder
from wanrun.artifact.manifest import Component
from wanrun.artifact.parameters import Parameter
from wanrun.errors import SourceError

BLOCK_ITEMS = 128 * 2**10
"""Items cast at a time: 512 KiB of float32 and 256 KiB of bfloat16."""

PERMUTED_AT_ONCE = 2
"""Tensors that may be in memory as a whole, permuted copy at a time, for any number of threads."""


class TensorSource(Protocol):
    """A reader of source tensors; thread-safe."""

    def entry(self, key: str) -> TensorEntry:
        """Returns shape and dtype of a tensor."""
        ...

    def read(self, key: str, begin: int, out: np.ndarray) -> None:
        """Reads the tensor's stored bytes, from byte ``begin`` on, into an array of bytes."""
        ...

    def eight_bit(self, key: str) -> EightBit | None:
        """Returns how the values of an 8-bit tensor are restored; None for a plain dtype."""
        ...


@dataclass(frozen=True)
class WrittenComponent:
    """A written component, and the crc32c of every source tensor read for it."""

    component: Component
    source_crc32c: Mapping[str, str]


@dataclass(frozen=True)
class Piece:
    """A part of the work for one thread.

    Args:
        nbytes: source bytes that it reads.
        run: does the work.
    """

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


class _Tensor:
    """One source tensor that is read, cast and checksummed from start to end.

    Args:
        fill: its key and transform.
        source: its reader.
        delta: a delta to add, or None.
        component: its component, for messages: two experts have the same keys.
    """

    def __init__(self, fill: Fill, source: TensorSource, delta: Delta | None, component: str) -> None:
        self.key, self._component = fill.key, component
        self._source, self._delta = source, delta
        self._entry, self._eight_bit = source.entry(fill.key), source.eight_bit(fill.key)
        self.crc32c = 0
        self._permuted: np.ndarray | None = None
        self.itemsize = self._entry.dtype.itemsize
        if fill.transform in PERMUTING:
            self._permuted = self._permute(fill.transform)

    def _permute(self, transform: str) -> np.ndarray:
        """Returns the whole tensor with permuted axes, flat and in its own dtype (or float32, see below)."""
        values = np.empty(math.prod(self._entry.shape), self._entry.dtype)
        data = values.view(np.uint8)
        self._source.read(self.key, 0, data)
        self.crc32c = crc32c(data.data)
        values = self._values(values, 0)
        return np.ascontiguousarray(TRANSFORMS[transform](values.reshape(self._entry.shape))).reshape(-1)

    def _values(self, stored: np.ndarray, start: int) -> np.ndarray:
        """Returns the values of stored items: those themselves, or float32 of 8-bit ones or with a delta."""
        values = stored if self._eight_bit is None else self._eight_bit.values(stored, start)
        if self._delta is None:
            return values
        values = values.astype(np.float32, copy=False)
        self._delta.add_to(values, start)
        return values

    def _read(self, start: int, stop: int, buffer: np.ndarray) -> np.ndarray:
        if self._permuted is not None:
            return self._permuted[start:stop]
        size = self._entry.dtype.itemsize
        data = buffer[: (stop - start) * size]
        self._source.read(self.key, start * size, data)
        self.crc32c = crc32c(data.data, self.crc32c)
        return self._values(data.view(self._entry.dtype), start)

    def cast(self, start: int, block: np.ndarray, buffer: np.ndarray) -> None:
        """Fills a block of the stored dtype with the items from ``start`` on; ``buffer`` is for read bytes.

        Raises:
            SourceError: if a value is not finite.
        """
        values = self._read(start, start + block.size, buffer)
        with np.errstate(invalid="ignore", over="ignore"):  # a signalling NaN would warn
            block[...] = values
        if not finite(block):
            merged = self._delta is not None
            raise SourceError(
                f"{self._component}: {self.key} has a value that is not finite in {block.dtype}"
                + (" after the LoRAs were added" if merged else ""),
                expected="finite weights",
                found="NaN or infinity",
                remedy="use smaller scales" if merged else "use an undamaged checkpoint",
            )


def finite(block: np.ndarray) -> bool:
    """Returns whether all values are finite, by their exponent bits: an integer compare is cheapest."""
    bits = 8 * block.dtype.itemsize
    mask = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[block.dtype.name]
    exponents = block.view(f"u{bits // 8}") & mask
    return bool(exponents.max(initial=0) != mask)


def component_layouts(assignments: Sequence[Assignment]) -> dict[str, ArrayLayout]:
    """Returns the layout of every parameter."""
    return {item.path: plan_layout(item.shape, item.dtype.name, item.stacked) for item in assignments}


@dataclass
class _Work:
    """The shared state of one component's pieces."""

    rows: dict[tuple[str, int], list[_Row]] = field(default_factory=dict)
    source_crc32c: dict[str, str] = field(default_factory=dict)


class ComponentWriter:
    """Writes one component's checkpoint: run every piece of ``pieces``, in any order, then ``finish``.

    Args:
        folder: the checkpoint's folder, to be created.
        assignments: the source of every parameter.
        source: the source tensors.
        deltas: deltas to add to source tensors, by key.
        on_bytes: called with the source bytes of each written row; may raise to stop.
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

    def pieces(self) -> list[Piece]:
        """Creates the folders and returns the work, one piece per source tensor or small chunk file.

        A piece's ``run`` raises SourceError if a source tensor has a value that is not finite or cannot be
        read, and OSError if a file cannot be written.
        """
        pieces = []
        for item in self._assignments:
            layout = self._layouts[item.path]
            (self._folder / array_folder(item.path)).mkdir(parents=True)
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
        axes = {item.path: item.axes for item in self._assignments}
        for path, layout in sorted(self._layouts.items()):
            rows = [row for chunk in range(layout.chunks) for row in self._work.rows[path, chunk]]
            parameters[path] = Parameter(
                layout=layout,
                axes=axes[path],
                crc32c=tuple(row.crc32c for row in rows),
                sha256=hashlib.sha256(b"".join(row.sha256 for row in rows)).hexdigest(),
            )
        return WrittenComponent(
            Component(f"weights/{self._folder.name}", parameters), self._work.source_crc32c
        )

    def _piece(self, item: Assignment, layout: ArrayLayout, chunks: range) -> Piece:
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

        return Piece(nbytes, run)

    def _write_files(self, item: Assignment, layout: ArrayLayout, chunks: range) -> None:
        """Writes these chunk files of a parameter; reads each source tensor once, from start to end."""
        row_items = math.prod(layout.row_shape)
        tensor: _Tensor | None = None
        for chunk in chunks:
            path = self._folder / array_folder(item.path) / layout.chunk_file(chunk)
            path.parent.mkdir(parents=True, exist_ok=True)
            written: list[_Row] = []
            with DirectFile(path, layout.chunk_bytes, self._buffers.write) as file:
                crc = 0
                for row in range(chunk * layout.rows_per_chunk, (chunk + 1) * layout.rows_per_chunk):
                    if tensor is None:
                        fill = item.fills[row if item.stacked else 0]
                        delta = self._deltas.get(fill.key)
                        tensor = _Tensor(fill, self._source, delta, self._folder.name)
                    start = 0 if item.stacked else row * row_items
                    # The chunk's own checksum covers all of its rows; with one row both are the same.
                    earlier = crc if written else None
                    result, crc = self._write_row(tensor, start, row_items, item.dtype, file, earlier)
                    written.append(result)
                    self._on_bytes(row_items * tensor.itemsize)
                    if item.stacked or row == layout.rows - 1:
                        self._work.source_crc32c[tensor.key] = f"{tensor.crc32c:08x}"
                        tensor = None
                file.append(crc.to_bytes(CRC_BYTES, "little"))
            self._work.rows[item.path, chunk] = written

    def _write_row(
        self,
        tensor: _Tensor,
        start: int,
        count: int,
        dtype: np.dtype[Any],
        file: DirectFile,
        earlier_crc: int | None,
    ) -> tuple[_Row, int]:
        """Appends ``count`` items of the tensor, from ``start`` on, to a chunk file.

        Args:
            tensor: the tensor.
            start: first item.
            count: items in the row.
            dtype: the stored dtype.
            file: the chunk file.
            earlier_crc: crc32c of the file's earlier rows, or None if this is the first row.

        Returns:
            The row's checksums, and the crc32c of all rows in the file.
        """
        sha, row_crc, all_crc = hashlib.sha256(), 0, earlier_crc
        stop = start + count
        while start < stop:
            block = file.space(min(stop - start, BLOCK_ITEMS), dtype)
            tensor.cast(start, block, self._buffers.read)
            data = block.view(np.uint8).data
            row_crc = crc32c(data, row_crc)
            if all_crc is not None:
                all_crc = crc32c(data, all_crc)
            sha.update(data)
            file.advance(data.nbytes)
            start += block.size
        return _Row(f"{row_crc:08x}", sha.digest()), row_crc if all_crc is None else all_crc
