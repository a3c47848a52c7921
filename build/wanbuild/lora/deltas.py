"""What a LoRA adds to one weight, computed block by block.

A low-rank delta is exact before its one rounding to float32. The bits that a float32 matrix product gives
depend on the CPU, the number of threads and on which rows are computed together, so an artifact's digest
would too. Here the rows of one factor and the columns of the other are rounded to so few bits, below their
length, that every product and every partial sum is a float64: the order of summation cannot matter, and the
same LoRA gives the same bits everywhere. It costs a float64 product where float32 would do: twice the time.
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
"""A group of rows is multiplied tile by tile, with this many multiplications at most in one BLAS call.

OpenBLAS gives a larger product to all its threads, which wait for one another by spinning: beside the threads
of a conversion that took 5 to 10 times as long as one thread alone. Small tiles need no packing and are as
fast as one large product on one thread (40 to 48 GFLOP/s).
"""

FLOAT64_BITS = 53
_LENGTH_BITS = 12


class Delta(Protocol):
    """What is added to a tensor before it is cast."""

    def add_to(self, block: np.ndarray, start: int) -> None:
        """Adds items start to start + block.size, in stored order, to a flat float32 block, in place."""
        ...


@dataclass(frozen=True)
class SummedDelta:
    """Deltas of several LoRAs on one weight, added in order, each rounded to float32 as peft does."""

    deltas: Sequence[Delta]

    def add_to(self, block: np.ndarray, start: int) -> None:
        """See ``Delta``."""
        for delta in self.deltas:
            delta.add_to(block, start)


@dataclass(frozen=True)
class FullDelta:
    """A delta that the file holds as it is, times a factor.

    Args:
        file: the LoRA.
        key: its tensor, as many items as the weight has, in the same order.
        factor: what it is multiplied by.
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
    """The product of one weight's factors, a group of rows at a time."""

    def __init__(self, up: np.ndarray, down: np.ndarray) -> None:
        rank, columns = down.shape
        self._up, self._index = up, -1
        self._values = np.empty((GROUP_ROWS, columns))
        self.group_items = self._values.size
        width = max(1, min(TILE_COLUMNS, TILE_PRODUCTS // (GROUP_ROWS * rank)))
        # Views [tile, row, column]; the last columns, where the width does not divide them, are a tile alone.
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
        """Items of rows index * GROUP_ROWS on, float64, valid until the next call."""
        rows = self._up[index * GROUP_ROWS : (index + 1) * GROUP_ROWS]
        if index != self._index:
            for down, values in self._tiles:
                np.matmul(rows, down, out=values[:, : len(rows)])
            self._index = index
        return self._values[: len(rows)].reshape(-1)


class LowRankDelta:
    """factor · up @ down.

    The matrices are read when the first block is asked for and let go after the last one, so memory is that
    of the weights being written at the moment. Blocks come in ascending order, from one thread at a time.

    Args:
        file: the LoRA.
        up: key of the tensor of shape [rows, rank], or that with trailing ones.
        down: key of the tensor of shape [rank, columns], or [rank, ...] with as many items.
        factor: what the product is multiplied by.
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
    """Rounds two factors so that their product has no rounding in float64, whatever the order of summation.

    A row of up becomes multiples of 2^-27 of a bound of its length, a column of down of 2^-26. A sum of some
    of the products of a row and a column is then an integer times one power of two, and by the inequality
    of Cauchy and Schwarz the integer is at most 2^53. First each rank's two vectors are scaled to the same
    size by a power of two, or a small part of a row that meets large values would lose its bits.

    Args:
        up: shape [rows, rank], float64; overwritten.
        down: shape [rank, columns], float64; overwritten.

    Returns:
        The rounded factors; their product is that of the given ones to about 1e-7 of its largest values.
    """
    balance = (_exponent(down, axis=1) - _exponent(up, axis=0)) // 2
    up *= np.ldexp(1.0, balance)
    down *= np.ldexp(1.0, -balance)[:, None]
    bits = FLOAT64_BITS // 2
    return _round(up, 1, FLOAT64_BITS - bits), _round(down, 0, bits)


def _exponent(matrix: np.ndarray, axis: int) -> np.ndarray:
    """The smallest e with |x| < 2^e for all x along an axis; 0 where all are 0."""
    return np.frexp(np.maximum(matrix.max(axis), -matrix.min(axis)))[1]


def _length_exponent(matrix: np.ndarray, axis: int) -> np.ndarray:
    """An e with |x| <= 2^e for the vectors x along an axis, and for what they are rounded to.

    The squares are those of whole numbers of 12 bits, rounded up, so that their sum has no rounding either.
    """
    largest = _exponent(matrix, axis)
    whole = np.abs(matrix)
    whole *= np.ldexp(1.0, np.expand_dims(_LENGTH_BITS - largest, axis))
    np.ceil(whole, out=whole)
    squares = np.einsum("ij,ij->i" if axis == 1 else "ij,ij->j", whole, whole)
    return largest - _LENGTH_BITS + (np.frexp(squares)[1] + 1) // 2


def _round(matrix: np.ndarray, axis: int, bits: int) -> np.ndarray:
    """Rounds the vectors along an axis to multiples of 2^-bits of their length's bound, in place."""
    shift = np.expand_dims(bits - _length_exponent(matrix, axis), axis)
    matrix *= np.ldexp(1.0, shift)
    np.rint(matrix, out=matrix)
    matrix *= np.ldexp(1.0, -shift)
    return matrix


def _add(block: np.ndarray, values: np.ndarray) -> None:
    """Adds float64 values to a float32 block; a sum too large is infinite, which the writer refuses."""
    with np.errstate(over="ignore"):
        block += values.astype(np.float32)
