"""How far two results lie apart."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from wanrun.executables.tolerance import RUN, Apart, levels_apart, most_apart, most_levels, relative_error


def test_a_relative_error() -> None:
    """Of the second argument: the two orders differ by far."""
    assert relative_error(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)
    one, four = np.ones(1), np.full(1, 4.0)
    assert (relative_error(one, four), relative_error(four, one)) == (0.75, 3.0)
    assert math.isnan(relative_error(np.zeros(2), np.zeros(2)))  # and so at most nothing


def test_differences_that_are_alike() -> None:
    """They count for more than those that cancel, in runs of consecutive values."""
    right, noise = np.ones(1000), np.tile([1e-3, -1e-3], 500)
    assert relative_error(right + noise, right, RUN) < 1e-9
    assert relative_error(right + 1e-3, right, RUN) == pytest.approx(16e-3, rel=0.1)
    drawn = np.random.default_rng(0).standard_normal(2**17)
    found = [relative_error(right[0] + drawn, np.ones(drawn.size), run) for run in (1, RUN)]
    assert found[1] == pytest.approx(found[0], rel=0.1)
    assert most_apart(right + noise, right, 2e-3, RUN).agrees
    assert most_apart(right + 1e-3, right, 2e-3).agrees
    assert not most_apart(right + 1e-3, right, 2e-3, RUN).agrees


def test_bits_are_compared_as_what_they_are() -> None:
    """As integers, values of both signs next to zero would be 32 768 apart."""
    one, other = (np.array([1.0, sign * 1e-3], jnp.bfloat16).view(np.uint16) for sign in (1, -1))
    assert most_apart(one, other, 1e-2).error == pytest.approx(2e-3, rel=0.01)


def test_levels() -> None:
    black, other = np.zeros((2, 2), np.uint8), np.array([[0, 0], [0, 200]], np.uint8)
    assert levels_apart(black, other) == levels_apart(other, black) == 100.0
    assert levels_apart(black, black[0]) == math.inf
    assert most_levels(1e-2) == pytest.approx(3.55)


def test_outputs_that_are_apart() -> None:
    """Of several the one that is furthest beyond what is allowed counts."""
    zeros, ones = np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32)
    assert most_apart(zeros, zeros, 1e-4) == Apart(0.0, 1e-4) and most_apart({}, {}, 1e-4).agrees
    assert most_apart(ones * (1 + 1e-5), ones, 1e-4).agrees
    for wrong in (ones * np.nan, ones[0], ones * 1.1):
        assert not most_apart(wrong, ones, 1e-4).agrees
    assert not most_apart(ones * 1e-9, zeros, 1e-4).agrees
    assert not most_apart(ones * np.nan, ones * np.nan, 1e-4).agrees  # it shows nothing
    black, white = zeros.astype(np.uint8), ones.astype(np.uint8)
    assert most_apart({"a": ones, "b": white}, {"a": ones, "b": black}, 1e-4).unit == "levels"
    found = most_apart({"a": 2 * ones, "b": 9 * white}, {"a": ones, "b": black}, 1e-4)
    assert (found.error, found.unit, found.agrees) == (1.0, "relative", False)
