"""How far two results lie apart."""

from __future__ import annotations

import math

import numpy as np
import pytest

from wanrun.executables.tolerance import first_difference, levels_apart, most_levels, relative_error


def test_a_relative_error() -> None:
    """Of the second argument: the two orders differ by far."""
    assert relative_error(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)
    one, four = np.ones(1), np.full(1, 4.0)
    assert (relative_error(one, four), relative_error(four, one)) == (0.75, 3.0)
    assert math.isnan(relative_error(np.zeros(2), np.zeros(2)))  # and so at most nothing


def test_levels() -> None:
    black, other = np.zeros((2, 2), np.uint8), np.array([[0, 0], [0, 200]], np.uint8)
    assert levels_apart(black, other) == levels_apart(other, black) == 100.0
    assert levels_apart(black, black[0]) == math.inf
    assert most_levels(1e-2) == pytest.approx(3.55)


def test_differences() -> None:
    zeros, ones = np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32)
    assert first_difference(zeros, zeros, 1e-4) == "" == first_difference(ones, ones * (1 + 1e-5), 1e-4)
    assert first_difference(zeros, ones * 1e-9, 1e-4) == "by nan relative, at most 0.0001"
    assert first_difference(ones, ones * np.nan, 1e-4) != ""
    black, white = zeros.astype(np.uint8), ones.astype(np.uint8)
    assert first_difference({"a": ones, "b": white}, {"a": ones, "b": black}, 1e-4) == ""
    assert first_difference({"b": 9 * white}, {"b": black}, 1e-4) == "by 9 levels, at most 1.03"
