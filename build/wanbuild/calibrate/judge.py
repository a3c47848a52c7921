"""How far apart videos are, and how sure a mean of that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000
"""Of the bootstrap."""

MOST_DB = 100.0
"""The figure of equal videos, whose distance has no logarithm."""


@dataclass(frozen=True)
class Mean:
    """A mean with the interval that holds 90 % of the means of resampled values.

    Args:
        value: the mean.
        low: the 5 % quantile.
        high: the 95 % quantile.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1f} ({self.low:.1f} to {self.high:.1f})"


def psnr(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the peak signal-to-noise ratio of uint8 frames in dB, at most ``MOST_DB``."""
    error = float(np.mean((found.astype(np.float32) - expected.astype(np.float32)) ** 2, dtype=np.float64))
    return MOST_DB if error == 0 else min(MOST_DB, float(10 * np.log10(255**2 / error)))


def mean_of(values: Sequence[float] | np.ndarray) -> Mean:
    """Returns the mean of values, of each prompt one, with its bootstrap interval; always the same."""
    given = np.asarray(values, np.float64)
    drawn = np.random.default_rng(0).integers(len(given), size=(RESAMPLES, len(given)))
    low, high = np.quantile(given[drawn].mean(1), (0.05, 0.95))
    return Mean(float(given.mean()), float(low), float(high))
