"""Rounds rows of weights to 8 bits, symmetric, with one scale per row, and sums the errors.

A row's scale is its largest magnitude over the largest value of the dtype, and a stored value is the nearest
to weight / scale, ties to even. So it depends only on the row, and a row rounds to the same bits wherever a
block of rows begins. In a form with blocks, each block of a row is rounded like a row; its scale is the next
float16 that is not smaller, so that no value is larger than the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import ml_dtypes
import numpy as np

from wanrun import EIGHT_BITS

_SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Rows:
    """Rounded rows: bytes, uint8 (rows, items), and scales, float32 (rows,) or float16 (rows, blocks).

    ``lost`` is the sum of the squared errors of the values, and the sum of their squares.
    """

    stored: np.ndarray
    scales: np.ndarray
    lost: tuple[float, float]


class Quantiser:
    """Rounds blocks of at most ``items`` values in buffers that are reused: one for each thread."""

    def __init__(self, items: int) -> None:
        self._scaled, self._rounded = np.empty(items, np.float32), np.empty(items, np.float32)
        self._stored = np.empty(items, np.uint8)

    def __call__(self, values: np.ndarray, form: str) -> Rows:
        """Rounds rows, float32 or bfloat16 (rows, items), to a form of ``EIGHT_BITS``.

        Values that are not finite give scales that are not finite. The next call overwrites the returned
        bytes.
        """
        own, whole = EIGHT_BITS[form], values.shape
        rows = values.reshape(-1, own.block or whole[1])
        scaled, rounded, stored = (
            buffer[: rows.size].reshape(rows.shape) for buffer in (self._scaled, self._rounded, self._stored)
        )
        scaled[...] = rows
        squares = float(np.vdot(scaled, scaled))
        most = np.maximum(scaled.max(axis=1), -scaled.min(axis=1))
        scales = _scales((most / np.float32(own.largest)).astype(np.float32), own.scale_dtype)
        single = scales.astype(np.float32)
        np.divide(scaled, single[:, None], out=scaled)
        ROUNDING[own.dtype](scaled, rounded, stored)
        scaled -= rounded
        each = np.einsum("ij,ij->i", scaled, scaled).astype(np.float64)
        errors = each * np.square(single, dtype=np.float64)
        lost = float(errors.sum()), squares
        return Rows(stored.reshape(whole), scales.reshape(own.scale_shape(whole)), lost)


def _scales(exact: np.ndarray, dtype: str) -> np.ndarray:
    """Returns scales of a dtype, none smaller than the exact ones."""
    scales = exact.astype(dtype)
    if dtype == "float16":
        small = scales < exact
        scales[small] = np.nextafter(scales[small], np.float16(np.inf))
        scales[scales == 0] = 1  # a block of zeros
    else:
        scales[scales < _SMALLEST] = 1  # a row of zeros, or as good as that
    return scales


def _to_int8(scaled: np.ndarray, rounded: np.ndarray, stored: np.ndarray) -> None:
    np.rint(scaled, out=rounded)
    with np.errstate(invalid="ignore"):  # values that are not finite are refused by their scales
        np.copyto(stored.view(np.int8), rounded, casting="unsafe")


def _float8_bytes() -> np.ndarray:
    """Returns the e4m3 byte of a normal value by the upper 12 bits of its float32, uint8 (4096,)."""
    upper = np.arange(4096)
    exponent, mantissa = (upper >> 3 & 0xFF) - 120, upper & 7
    return ((upper >> 11 << 7) | (np.clip(exponent, 0, 15) << 3) | mantissa).astype(np.uint8)


_FLOAT8 = _float8_bytes()
_NORMAL, _STEP = np.float32(2**-6), np.float32(2**-9)
"""The smallest normal value of e4m3, and the distance of the values below it."""


def _to_float8(scaled: np.ndarray, rounded: np.ndarray, stored: np.ndarray) -> None:
    """Rounds to float8_e4m3fn like its cast in ml_dtypes, which takes four times as long."""
    source, bits = scaled.view(np.uint32), rounded.view(np.uint32)
    np.right_shift(source, 20, out=bits)
    bits &= 1
    bits += source
    bits += 0x7FFFF  # half of the last bit that is kept, less what makes ties go to even
    bits >>= 20
    np.take(_FLOAT8, bits, mode="wrap", out=stored)
    bits <<= 20
    small = np.flatnonzero(np.abs(scaled) < _NORMAL)
    steps = np.rint(scaled.reshape(-1)[small] / _STEP)
    rounded.reshape(-1)[small] = steps * _STEP
    signs = np.signbit(scaled.reshape(-1)[small]).astype(np.uint8) << 7
    stored.reshape(-1)[small] = np.abs(steps).astype(np.uint8) | signs


def by_cast(dtype: str, scaled: np.ndarray, rounded: np.ndarray, stored: np.ndarray) -> None:
    """Rounds ``scaled``, float32, to an 8-bit float by its cast in ml_dtypes.

    The values go into ``rounded``, float32, and their bytes into ``stored``, uint8, both of the same shape.
    """
    values = scaled.astype(getattr(ml_dtypes, dtype))
    rounded[...], stored[...] = values, values.view(np.uint8)


_FASTER: Mapping[str, Callable[[np.ndarray, np.ndarray, np.ndarray], None]] = MappingProxyType(
    {"int8": _to_int8, "float8_e4m3fn": _to_float8}
)

ROUNDING: Mapping[str, Callable[[np.ndarray, np.ndarray, np.ndarray], None]] = MappingProxyType(
    {one.dtype: _FASTER.get(one.dtype, partial(by_cast, one.dtype)) for one in EIGHT_BITS.values()}
)
"""By dtype, the function that fills ``rounded`` with the nearest values to ``scaled``, and ``stored`` with
their bytes: the cast, unless there is a faster way to the same bits."""
