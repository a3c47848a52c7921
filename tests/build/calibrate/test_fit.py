"""Fitted coefficients: beside the solver's for a flow that is known, and as the device runs them."""

from __future__ import annotations

import numpy as np

from helpers.known_flow import SPREAD, error, fitted, starts
from wanbuild.calibrate.fit import Coefficients, fit
from wanrun.denoising.solvers import solver_table

LEVELS = (1000.0, 936.0, 833.0, 625.0, 300.0)


def few(count: int) -> Coefficients:
    return fitted(np.array(LEVELS) / 1000, count, lambda x: x[::2])


def test_nearer_than_every_solver_to_videos_that_were_not_seen() -> None:
    """Five steps of this flow, from other noise: at most a third of the error of the best solver."""

    def of(name: str, coefficients: Coefficients | None = None) -> float:
        return error(solver_table(name, 1, 1.0, timesteps=LEVELS, coefficients=coefficients))

    best = min(of(name) for name in ("unipc", "dpm++", "euler"))
    assert of("unipc", few(12)) < best / 3


def test_steps_have_as_many_vectors_as_there_are() -> None:
    found = np.array(few(2))
    assert found.shape == (len(LEVELS), 4)
    assert (found[0, 2:] == 0).all() and found[1, 3] == 0 and found[3:].all()
    assert few(2) == few(2)


def test_a_step_that_is_exact_is_found() -> None:
    """Where the next latents are a combination of what there is, the fit is that combination."""
    rng = np.random.default_rng(1)
    rows = ((0.7, 0.3, 0.0, 0.0), (0.6, 0.5, -0.1, 0.0), (0.4, 0.8, -0.3, 0.1))
    given, noise = starts(3, 3), rng.standard_normal((3, 3, len(SPREAD))).astype(np.float32)
    targets = []
    for number, x in enumerate(given):
        levels, before = list[np.ndarray](), list[np.ndarray]()
        for step, row in enumerate(rows):
            before = [noise[number, step], *before][:3]
            x = sum((w * m for w, m in zip(row[1:], before, strict=False)), row[0] * x).astype(np.float32)
            levels.append(x)
        targets.append(np.stack(levels))
    found = fit(lambda number, step, x: noise[number, step], given, targets, [1, 0.5, 0.2, 0], lambda x: x)
    np.testing.assert_allclose(found, rows, atol=3e-4)  # the ridge's share
