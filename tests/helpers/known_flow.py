"""A flow that is known: from noise to normal data, whose clean prediction is linear in x."""

from __future__ import annotations

import numpy as np

SPREAD = np.geomspace(3.0, 0.03, 64)
"""Standard deviations of the data."""


def predicted(x: np.ndarray, sigma: float) -> np.ndarray:
    """The mean of the clean data at x (..., 64), of data and noise that are normal."""
    return np.asarray((1 - sigma) * SPREAD**2 / ((1 - sigma) ** 2 * SPREAD**2 + sigma**2) * x)


def exact(start: np.ndarray, sigmas: np.ndarray) -> np.ndarray:
    """The latents (K, 64) at these levels, float32: the flow keeps x in units of its deviation."""
    deviation = np.sqrt((1 - sigmas[:, None]) ** 2 * SPREAD**2 + sigmas[:, None] ** 2)
    return np.asarray(start * deviation, np.float32)


def starts(first: int, count: int) -> list[np.ndarray]:
    """Noise of so many seeds, from the first one, float32 (64,)."""
    drawn = [np.random.default_rng(seed).standard_normal(len(SPREAD)) for seed in range(first, first + count)]
    return [one.astype(np.float32) for one in drawn]
