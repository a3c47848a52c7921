"""The values that a LoRA adds to one weight, computed in float64 and rounded once, to float32.

A product is computed by blocks of rows and columns whose bounds depend only on its shape. The last bits of a
sum depend on its order, and so on the blocks: this way a machine gives the same bits however much it writes
at a time, and with any number of threads. Another kind of CPU may round a few values the other way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from wanbuild.source.safetensors import TensorFile

BLOCK_ROWS = 32
BLOCK_PRODUCTS = 2**18
"""The largest number of multiplications in one BLAS call.

OpenBLAS splits a larger product among all its threads, which wait for one another by spinning: next to a
conversion's threads that took 5 to 10 times as long as a single thread.
"""


class Delta(Protocol):
    """A change that is added to a tensor before the cast."""

    def add_to(self, block: np.ndarray, start: int) -> None:
        """Adds items start to start + block.size, in stored order, to a flat float32 block, in place."""
        ...


@dataclass(frozen=True)
class SummedDelta:
    """Deltas of several LoRAs on one weight, added in order; each is rounded to float32, as in peft."""

    deltas: Sequence[LowRankDelta | FullDelta]

    def add_to(self, block: np.ndarray, start: int) -> None:
        """See ``Delta``."""
        for delta in self.deltas:
            delta.add_to(block, start)


@dataclass(frozen=True)
class FullDelta:
    """A full delta from a LoRA's file, times a factor; its items are in the weight's order."""

    file: TensorFile
    key: str
    factor: float

    def add_to(self, block: np.ndarray, start: int) -> None:
        """See ``Delta``."""
        values = np.empty(block.size, self.file.entries[self.key].dtype)
        self.file.read(self.key, start * values.itemsize, values.view(np.uint8))
        _add(block, values.astype(np.float64) * self.factor)

    def values(self) -> np.ndarray:
        """Returns all of it, float64, in stored order and flat."""
        return self.file.array(self.key).reshape(-1).astype(np.float64) * self.factor


class _Product:
    """up @ down, by blocks of ``BLOCK_ROWS`` rows."""

    def __init__(self, up: np.ndarray, down: np.ndarray) -> None:
        self._up, self._down = up, down
        self._index, self._values = -1, np.empty((BLOCK_ROWS, down.shape[1]))

    def rows(self, index: int) -> np.ndarray:
        """Returns the items of a block of rows in float64, valid until the next call."""
        up = self._up[index * BLOCK_ROWS : (index + 1) * BLOCK_ROWS]
        values = self._values[: len(up)]
        if index != self._index:
            width = max(1, BLOCK_PRODUCTS // (BLOCK_ROWS * len(self._down)))
            for first in range(0, values.shape[1], width):
                columns = slice(first, first + width)
                np.matmul(up, self._down[:, columns], out=values[:, columns])
            self._index = index
        return values.reshape(-1)


class LowRankDelta:
    """factor · up @ down.

    The matrices are read at the first block and released after the last one, so memory holds only the factors
    of weights being written. Blocks come in ascending order, from one thread at a time. ``up`` is the key of
    a tensor [rows, rank], possibly with trailing ones, ``down`` that of a tensor [rank, columns], or [rank,
    ...] with as many items.
    """

    def __init__(self, file: TensorFile, up: str, down: str, factor: float) -> None:
        self._file, self._up, self._down, self._factor = file, up, down, factor
        self.rank, *columns = file.entries[down].shape
        self._columns = math.prod(columns)
        self._items = math.prod(file.entries[up].shape) // self.rank * self._columns
        self._product: _Product | None = None

    def add_to(self, block: np.ndarray, start: int) -> None:
        """See ``Delta``."""
        product = self._product = self._product or self._open()
        position, stop = start, start + block.size
        while position < stop:
            index, skip = divmod(position, BLOCK_ROWS * self._columns)
            values = product.rows(index)[skip : skip + stop - position]
            _add(block[position - start : position - start + values.size], values)
            position += values.size
        if stop == self._items:
            self._product = None

    def _open(self) -> _Product:
        return _Product(self.up(), self.down())

    def down(self) -> np.ndarray:
        """Returns the down matrix, float64 (rank, columns)."""
        return self._file.array(self._down).reshape(self.rank, -1).astype(np.float64)

    def up(self) -> np.ndarray:
        """Returns the up matrix times the factor, float64 (rows, rank)."""
        return self._file.array(self._up).reshape(-1, self.rank).astype(np.float64) * self._factor


def _add(block: np.ndarray, values: np.ndarray) -> None:
    """Adds float64 values to a float32 block; overflow gives infinity, which the writer refuses."""
    with np.errstate(over="ignore"):
        block += values.astype(np.float32)
