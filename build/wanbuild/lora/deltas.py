"""The values that a LoRA adds to one weight, computed block by block.

A low-rank delta is exact before its one rounding to float32. The bits of a float32 matrix product depend on
the CPU, the number of threads and the rows computed together, and an artifact's digest would depend on them
too. Here the rows of one factor and the columns of the other are rounded to so few bits, relative to their
norm, that every product and every partial sum is exact in float64. So the order of summation does not matter,
and the same LoRA gives the same bits everywhere. The cost is a float64 product instead of float32: twice the
time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from wanbuild.source.safetensors import TensorFile

GROUP_ROWS = 32
TILE_COLUMNS = 64
TILE_PRODUCTS = 2**18
"""The largest number of multiplications in one BLAS call; a group of rows is multiplied tile by tile.

OpenBLAS splits a larger product among all its threads, which wait for one another by spinning: beside a
conversion's threads that took 5 to 10 times as long as one thread alone. Small tiles need no packing and are
as fast as one large product on one thread (40 to 48 GFLOP/s).
"""

FLOAT64_BITS = 53
_LENGTH_BITS = 12


class Delta(Protocol):
    """A change that is added to a tensor before the cast."""

    def add_to(self, block: np.ndarray, start: int) -> None:
        """Adds items start to start + block.size, in stored order, to a flat float32 block, in place."""
        ...


@dataclass(frozen=True)
class SummedDelta:
    """Deltas of several LoRAs on one weight, added in order; each is rounded to float32, as in peft."""

    deltas: Sequence[Delta]

    def add_to(self, block: np.ndarray, start: int) -> None:
        """See ``Delta``."""
        for delta in self.deltas:
            delta.add_to(block, start)


@dataclass(frozen=True)
class FullDelta:
    """A full delta from the file, times a factor.

    Args:
        file: the LoRA.
        key: its tensor, with as many items as the weight, in the same order.
        factor: the factor.
    """

    file: TensorFile
    key: str
    factor: float

    def add_to(self, block: np.ndarray, start: int) -> None:
        """See ``Delta``."""
        values = np.empty(block.size, self.file.entries[self.key].dtype)
        self.file.read(self.key, start * values.itemsize, values.view(np.uint8))
        _add(block, values.astype(np.float64) * self.factor)


class _Product:
    """The product of one weight's factors, computed by groups of rows."""

    def __init__(self, up: np.ndarray, down: np.ndarray) -> None:
        rank, columns = down.shape
        self._up, self._index = up, -1
        self._values = np.empty((GROUP_ROWS, columns))
        self.group_items = self._values.size
        width = max(1, min(TILE_COLUMNS, TILE_PRODUCTS // (GROUP_ROWS * rank)))
        # Views [tile, row, column]; columns left over after whole tiles are one narrower tile.
        whole = columns - columns % width
        self._tiles = [
            tuple(
                matrix[:, first:last].reshape(len(matrix), -1, size).transpose(1, 0, 2)
                for matrix in (down, self._values)
            )
            for first, last, size in ((0, whole, width), (whole, columns, columns % width))
            if size and first < last
        ]

    def group(self, index: int) -> np.ndarray:
        """Returns the items of the group's rows in float64, valid until the next call."""
        rows = self._up[index * GROUP_ROWS : (index + 1) * GROUP_ROWS]
        if index != self._index:
            for down, values in self._tiles:
                np.matmul(rows, down, out=values[:, : len(rows)])
            self._index = index
        return self._values[: len(rows)].reshape(-1)


class LowRankDelta:
    """factor · up @ down.

    The matrices are read at the first block and released after the last one, so memory holds only the factors
    of weights being written. Blocks come in ascending order, from one thread at a time.

    Args:
        file: the LoRA.
        up: key of a tensor of shape [rows, rank], possibly with trailing ones.
        down: key of a tensor of shape [rank, columns], or [rank, ...] with as many items.
        factor: the factor of the product.
    """

    def __init__(self, file: TensorFile, up: str, down: str, factor: float) -> None:
        self._file, self._up, self._down, self._factor = file, up, down, factor
        rank = file.entries[down].shape[0]
        self._items = math.prod(file.entries[up].shape) * math.prod(file.entries[down].shape) // rank**2
        self._product: _Product | None = None

    def add_to(self, block: np.ndarray, start: int) -> None:
        """See ``Delta``."""
        product = self._product = self._product or self._open()
        position, stop = start, start + block.size
        while position < stop:
            index, skip = divmod(position, product.group_items)
            values = product.group(index)[skip : skip + stop - position]
            _add(block[position - start : position - start + values.size], values)
            position += values.size
        if stop == self._items:
            self._product = None

    def _open(self) -> _Product:
        down = self._matrix(self._down)
        up = self._matrix(self._up).reshape(-1, len(down))
        up *= self._factor
        return _Product(*fixed_point(up, down))

    def _matrix(self, key: str) -> np.ndarray:
        values = self._file.array(key)
        return values.reshape(len(values), -1).astype(np.float64)


def fixed_point(up: np.ndarray, down: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds two factors so that their product is exact in float64, for any order of summation.

    A row of up becomes multiples of 2^-27 times a bound of its norm, a column of down of 2^-26. Any partial
    sum of a row times a column is then an integer times one power of two, and by the Cauchy-Schwarz
    inequality the integer is at most 2^53. Before that, the two vectors of each rank are scaled to the same
    size by a power of two; otherwise a small part of a row that meets large values would lose its bits.

    Args:
        up: shape [rows, rank], float64; overwritten.
        down: shape [rank, columns], float64; overwritten.

    Returns:
        The rounded factors; their product differs from the exact one by about 1e-7 of its largest values.
    """
    balance = (_exponent(down, axis=1) - _exponent(up, axis=0)) // 2
    up *= np.ldexp(1.0, balance)
    down *= np.ldexp(1.0, -balance)[:, None]
    bits = FLOAT64_BITS // 2
    return _round(up, 1, FLOAT64_BITS - bits), _round(down, 0, bits)


def _exponent(matrix: np.ndarray, axis: int) -> np.ndarray:
    """Returns the smallest e with |x| < 2^e for all x along an axis; 0 if all are 0."""
    return np.frexp(np.maximum(matrix.max(axis), -matrix.min(axis)))[1]


def _length_exponent(matrix: np.ndarray, axis: int) -> np.ndarray:
    """Returns an e with |x| <= 2^e for the norms of the vectors x along an axis, also after rounding.

    It sums squares of 12-bit integers, rounded up, so the sum has no rounding either.
    """
    largest = _exponent(matrix, axis)
    whole = np.abs(matrix)
    whole *= np.ldexp(1.0, np.expand_dims(_LENGTH_BITS - largest, axis))
    np.ceil(whole, out=whole)
    squares = np.einsum("ij,ij->i" if axis == 1 else "ij,ij->j", whole, whole)
    return largest - _LENGTH_BITS + (np.frexp(squares)[1] + 1) // 2


def _round(matrix: np.ndarray, axis: int, bits: int) -> np.ndarray:
    """Rounds the vectors along an axis to multiples of 2^-bits times the bound of their norm, in place."""
    shift = np.expand_dims(bits - _length_exponent(matrix, axis), axis)
    matrix *= np.ldexp(1.0, shift)
    np.rint(matrix, out=matrix)
    matrix *= np.ldexp(1.0, -shift)
    return matrix


def _add(block: np.ndarray, values: np.ndarray) -> None:
    """Adds float64 values to a float32 block; overflow gives infinity, which the writer refuses."""
    with np.errstate(over="ignore"):
        block += values.astype(np.float32)
