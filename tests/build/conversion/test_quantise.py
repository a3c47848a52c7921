"""Rounding rows to 8 bits: the definition in NumPy, and ml_dtypes' cast."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from wanbuild.conversion.quantise import ROUNDING, Quantiser, by_cast
from wanrun import EIGHT_BITS

ROWS = [one.dtype for one in EIGHT_BITS.values() if not one.block]
"""The dtypes of forms with a scale for each row."""


def wild_rows() -> np.ndarray:
    """Rows of many sizes with outliers, ties, zeros, subnormal numbers, and nothing but zeros."""
    rng = np.random.default_rng(0)
    values = rng.standard_t(2, (40, 997)).astype(np.float32) * np.exp(rng.normal(0, 8, (40, 1)))
    values[3] = 0
    values[4] = np.float32(1e-42)
    values[5] = np.arange(997) % 255 - 127  # each value of int8
    values[6] = (np.arange(997) % 509 - 254) / 2  # halves: ties
    values[7, ::2] = 0
    return values.astype(np.float32)


def by_definition(values: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    largest = np.abs(values).max(axis=1, keepdims=True)
    scales = (largest / np.float32(EIGHT_BITS[dtype].largest)).astype(np.float32)
    scales[scales < np.finfo(np.float32).tiny] = 1
    scaled = values / scales
    return (np.rint(scaled) if EIGHT_BITS[dtype].whole else scaled).astype(dtype), scales


@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ROWS)
def test_rows_are_rounded_as_defined(dtype: str, source: str) -> None:
    values = wild_rows().astype(source)
    stored, scales = by_definition(values.astype(np.float32), dtype)
    found = Quantiser(values.size)(values, dtype)
    np.testing.assert_array_equal(found.stored, stored.view(np.uint8))
    np.testing.assert_array_equal(found.scales, scales[:, 0])
    errors = values.astype(np.float64) - stored.astype(np.float64) * scales
    expected = np.square(errors).sum(), np.square(values.astype(np.float64)).sum()
    np.testing.assert_allclose(found.lost, expected, rtol=1e-4)


def test_blocks_of_a_row_are_rounded_like_rows() -> None:
    """Each with its own scale in float16, which may be a subnormal number, and never too small."""
    values = wild_rows()[:, :992].clip(-1e5, 1e5)
    found = Quantiser(values.size)(values, "q8_0")
    assert (found.scales.dtype, found.scales.shape) == (np.float16, (40, 31))
    blocks, scales = values.reshape(40, 31, 32), found.scales.astype(np.float32)[..., None]
    exact = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    below = np.nextafter(found.scales, np.float16(0)).astype(np.float32)[..., None]
    assert ((below < exact) & (exact <= scales))[exact > 0].all() and (scales[exact == 0] == 1).all()
    stored = found.stored.view(np.int8)
    np.testing.assert_array_equal(stored.reshape(blocks.shape), np.rint(blocks / scales))
    own = (stored.reshape(blocks.shape) * scales).reshape(values.shape)
    expected = np.square(values.astype(np.float64) - own).sum(), np.square(values.astype(np.float64)).sum()
    np.testing.assert_allclose(found.lost, expected, rtol=1e-4)
    np.testing.assert_array_equal(Quantiser(992)(values[7:8], "q8_0").stored[0], stored[7].view(np.uint8))


def test_values_of_gguf_are_kept_by_blocks() -> None:
    """gguf rounds a scale to the nearest float16; what it gives rounds to itself."""
    values = (0.02 * np.random.default_rng(1).standard_normal((8, 96))).astype(np.float32)
    own = dequantize(quantize(values, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert Quantiser(own.size)(own, "q8_0").lost[0] == 0
    own[3, 40] = np.nan
    with np.errstate(invalid="ignore"):
        scales = Quantiser(own.size)(own, "q8_0").scales
    assert np.argwhere(~np.isfinite(scales)).tolist() == [[3, 1]]


def test_a_faster_rounding_gives_the_bits_of_the_cast() -> None:
    """A format without one has the cast."""
    scaled, found = wild_rows()[:3].clip(-448, 448), []
    for rounding in (ROUNDING["float8_e4m3fn"], partial(by_cast, "float8_e4m3fn")):
        rounded, stored = np.empty_like(scaled), np.empty(scaled.shape, np.uint8)
        rounding(scaled, rounded, stored)
        found.append((rounded.tobytes(), stored.tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ROWS)
def test_blocks_of_rows_have_the_same_bits(dtype: str) -> None:
    values, quantiser = wild_rows(), Quantiser(8 * 997)
    whole = Quantiser(values.size)(values, dtype).stored.copy()
    parts = [quantiser(values[first : first + 7], dtype).stored.copy() for first in range(0, 40, 7)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("dtype", ROWS)
def test_rounded_values_round_to_themselves(dtype: str) -> None:
    """Values of 8 bits with a scale for each row, whose largest is used, are stored as they are."""
    quantiser = Quantiser(40 * 997)
    first = quantiser(wild_rows(), dtype)
    stored = first.stored.copy()
    again = quantiser(stored.view(dtype).astype(np.float32) * first.scales[:, None], dtype)
    np.testing.assert_array_equal(again.stored.view(dtype), stored.view(dtype))
    assert again.lost[0] <= 1e-12 * again.lost[1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ROWS)
def test_values_that_are_not_finite_show_in_the_scale(dtype: str, value: float) -> None:
    values = wild_rows()
    values[9, 500] = value
    with np.errstate(invalid="ignore"):
        scales = Quantiser(values.size)(values, dtype).scales
    assert list(np.flatnonzero(~np.isfinite(scales))) == [9]
