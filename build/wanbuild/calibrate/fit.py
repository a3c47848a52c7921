"""Coefficients that are fitted to a model, step by step along the levels of converged runs.

A multistep solver goes from x to x' = a x + b_0 m0 + b_1 m1 + b_2 m2, where m0, m1 and m2 are the last three
predictions of the clean latents. A solver's coefficients are right for every flow in the limit of small
steps. Here steps are few and the flow is known: for each step in turn the coefficients are those with the
least squares of the distances to what the converged runs have at the next level, from where the runs with the
coefficients so far really are. So a step mends some of what those before it have lost. Where the vectors say
little about a coefficient, it stays near that of the first order (``RIDGE``): large ones would multiply the
noise of a dtype.

A step that asks no model and reuses an earlier velocity, as step caches do, ends at a combination of the same
vectors. The step before it goes there at once with other coefficients, so the fit contains the best of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Predict = Callable[[int, int, np.ndarray], np.ndarray]
"""Returns a run's prediction of the clean latents: of the run's number, the step's and the latents there."""

Coefficients = tuple[tuple[float, float, float, float], ...]

RIDGE = 1e-4
"""Weight of a coefficient's distance to that of the first order, relative to the squares of its vector."""

DIGITS = 7
"""Decimal places of a coefficient: float32 has no more."""


@dataclass(frozen=True)
class Steps:
    """Steps of a run, with decreasing timesteps.

    ``coefficients`` are fitted ones, for each step; None for those of the model's solver.
    """

    timesteps: tuple[float, ...]
    coefficients: Coefficients | None = None


@dataclass
class _Run:
    """A run in progress; ``vectors`` has x, then m0, m1 and m2 as far as there are any."""

    vectors: list[np.ndarray] = field(default_factory=list)

    def step(self, row: Sequence[float]) -> None:
        """Goes on to the next level, with as many coefficients as there are vectors."""
        x, *predictions = self.vectors
        made = row[0] * x
        for weight, prediction in zip(row[1:], predictions, strict=False):
            made = made + np.float32(weight) * prediction
        self.vectors = [made.astype(np.float32), *predictions[:2]]


def fit(
    predict: Predict,
    starts: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    sigmas: Sequence[float],
    thinned: Callable[[np.ndarray], np.ndarray],
) -> Coefficients:
    """Fits the coefficients of K steps to some runs together.

    ``starts`` has the initial latents of each run, float32. ``targets`` has for each run what ``thinned``
    latents are to be after each step, float32 (K, D); ``thinned`` returns those values (D,) of latents.
    ``sigmas`` are the K noise levels, and the last one, 0.
    """
    runs = [_Run([start]) for start in starts]
    rows: list[tuple[float, float, float, float]] = []
    for step in range(len(targets[0])):
        for number, run in enumerate(runs):
            x, *before = run.vectors
            run.vectors = [x, predict(number, step, x), *before]
        given = [np.stack([thinned(one) for one in run.vectors]).astype(np.float64) for run in runs]
        products = np.sum([one @ one.T for one in given], axis=0)
        towards = np.sum([one @ target[step] for one, target in zip(given, targets, strict=True)], axis=0)
        ratio = sigmas[step + 1] / sigmas[step]
        first_order = np.array([ratio, 1 - ratio, 0.0, 0.0])[: len(products)]
        held = np.diag(RIDGE * np.maximum(np.diag(products), 1e-9 * products.max()))
        found = np.linalg.solve(products + held, towards + held @ first_order)
        a, b_0, b_1, b_2 = [*(round(float(one), DIGITS) for one in found), 0.0, 0.0][:4]
        rows.append((a, b_0, b_1, b_2))
        for run in runs:
            run.step(rows[-1])
    return tuple(rows)
