"""How far two results lie apart."""

from __future__ import annotations

import math

import numpy as np
import pytest

from wanrun.executables.tolerance import levels_apart, most_levels, relative_error


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
