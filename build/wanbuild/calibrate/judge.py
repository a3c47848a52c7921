"""How far apart videos are, and how sure a mean of that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SHARE = 0.9
"""Share of intervals, each of another sample, that hold the true mean."""

MOST_DB = 100.0
"""The figure of equal videos, because the logarithm of their distance does not exist."""


@dataclass(frozen=True)
class Mean:
    """A mean with its interval of 90 % by Student's t.

    The interval of one value goes from -infinity to infinity, since nothing is known of others.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        how_sure = f"{self.low:.1f} to {self.high:.1f}" if math.isfinite(self.low) else "one prompt"
        return f"{self.value:.1f} ({how_sure})"


def psnr(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the peak signal-to-noise ratio of uint8 frames in dB, at most ``MOST_DB``."""
    error = float(np.mean((found.astype(np.float32) - expected.astype(np.float32)) ** 2, dtype=np.float64))
    return MOST_DB if error == 0 else min(MOST_DB, float(10 * np.log10(255**2 / error)))


def mean_of(values: Sequence[float] | np.ndarray) -> Mean:
    """Returns the mean of values, one per prompt; for differences the interval is that of a paired t-test."""
    given = np.asarray(values, np.float64)
    value, count = float(given.mean()), len(given)
    if count == 1:
        return Mean(value, -math.inf, math.inf)
    half = t_quantile(count - 1) * float(given.std(ddof=1)) / math.sqrt(count)
    return Mean(value, value - half, value + half)


def t_quantile(freedom: int, share: float = SHARE) -> float:
    """Returns the t, below 1000, with |T| < t in this share of Student's distribution.

    ``freedom`` is degrees of freedom, at least 1.
    """
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < share else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Returns the probability of |T| < t: Abramowitz and Stegun, 26.7.3 (odd) and 26.7.4 (even)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for place in range(2 + odd, freedom - 1, 2):
        term *= (place - 1) / place * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
