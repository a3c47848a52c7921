"""Distances of videos, and intervals of their means."""

from __future__ import annotations

import numpy as np
import pytest

from wanbuild.calibrate.judge import MOST_DB, Mean, mean_of, psnr, t_quantile


def test_psnr() -> None:
    frames = np.full((2, 3, 4, 4, 3), 100, np.uint8)
    assert psnr(frames, frames) == MOST_DB
    assert psnr(frames, frames + 5) == pytest.approx(20 * np.log10(255 / 5))
    assert psnr(np.zeros_like(frames), np.full_like(frames, 255)) == 0


def test_a_mean_and_its_interval() -> None:
    values = np.random.default_rng(3).normal(5, 2, 40)
    found = mean_of(values)
    assert found == mean_of(list(values)) and found.value == pytest.approx(values.mean())
    width = 1.6849 * values.std(ddof=1) / np.sqrt(40)  # of 39 degrees of freedom
    assert found.high - found.value == pytest.approx(width, rel=1e-4)
    assert found.value - found.low == pytest.approx(width, rel=1e-4)
    assert mean_of([2.0, 4.0]) == Mean(3.0, *(pytest.approx(3 + t * 6.313752) for t in (-1, 1)))


def test_one_value_says_nothing_of_others() -> None:
    found = mean_of([3.0])
    assert found == Mean(3.0, -np.inf, np.inf) and str(found) == "3.0 (one prompt)"


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [
        (1, 6.313752),
        (2, 2.919986),
        (3, 2.353363),
        (4, 2.131847),
        (11, 1.795885),
        (30, 1.697261),
        (999, 1.646380),
    ],
)
def test_quantiles_of_student_s_distribution(freedom: int, expected: float) -> None:
    """Beside the table of NIST's handbook of statistical methods, 1.3.6.7.2, with more digits."""
    assert t_quantile(freedom) == pytest.approx(expected, abs=1e-6)
    assert t_quantile(10, 0.95) == pytest.approx(2.228139, abs=1e-6)
