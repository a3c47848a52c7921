"""A flow that is known: from noise to normal data, whose clean prediction is linear in x."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from wanbuild.calibrate.fit import Coefficients, fit
from wanrun.denoising.solvers import COLUMNS, SolverTable

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


def fitted(
    levels: Sequence[float] | np.ndarray, count: int, thinned: Callable[[np.ndarray], np.ndarray]
) -> Coefficients:
    """Coefficients of steps at these levels, fitted to so many starts."""
    sigmas, given = np.append(levels, 0.0), starts(0, count)

    def predict(number: int, step: int, x: np.ndarray) -> np.ndarray:
        return predicted(x, float(sigmas[step])).astype(np.float32)

    targets = [np.stack([thinned(level) for level in exact(one, sigmas[1:])]) for one in given]
    return fit(predict, given, targets, sigmas.tolist(), thinned)


def error(table: SolverTable) -> float:
    """The mean squared error of a table's results, from starts that nothing was fitted to."""
    return float(np.mean([(_run(table, one) - exact(one, np.zeros(1))[0]) ** 2 for one in starts(500, 20)]))


def _run(table: SolverTable, x: np.ndarray) -> np.ndarray:
    """The recurrence of ``wanrun.denoising.solvers`` in float64."""
    last = m1 = m2 = np.zeros_like(x)
    for row in table.coefficients.astype(np.float64):
        c = dict(zip(COLUMNS, row, strict=True))
        m0 = predicted(x, c["sigma"])
        last = c["c_x"] * x + c["c_last"] * last + c["c_0"] * m0 + c["c_1"] * m1 + c["c_2"] * m2
        x, m1, m2 = c["p_x"] * last + c["p_0"] * m0 + c["p_1"] * m1, m0, m1
    return x
