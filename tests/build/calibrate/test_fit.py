"""Fitted coefficients: beside the solver's for a flow that is known, and as the device runs them."""

from __future__ import annotations

import numpy as np

from helpers.known_flow import SPREAD, exact, predicted, starts
from wanbuild.calibrate.fit import Coefficients, fit
from wanrun.denoising.solvers import COLUMNS, SolverTable, solver_table

LEVELS = (1000.0, 936.0, 833.0, 625.0, 300.0)


def run(table: SolverTable, x: np.ndarray) -> np.ndarray:
    last = m1 = m2 = np.zeros_like(x)
    for row in table.coefficients.astype(np.float64):
        c = dict(zip(COLUMNS, row, strict=True))
        m0 = predicted(x, c["sigma"])
        last = c["c_x"] * x + c["c_last"] * last + c["c_0"] * m0 + c["c_1"] * m1 + c["c_2"] * m2
        x, m1, m2 = c["p_x"] * last + c["p_0"] * m0 + c["p_1"] * m1, m0, m1
    return x


def fitted(count: int) -> Coefficients:
    sigmas = np.append(np.array(LEVELS) / 1000, 0.0)
    given = starts(0, count)

    def predict(number: int, step: int, x: np.ndarray) -> np.ndarray:
        return predicted(x, float(sigmas[step])).astype(np.float32)

    targets = [exact(one, sigmas[1:])[:, ::2] for one in given]
    return fit(predict, given, targets, sigmas.tolist(), lambda x: x[::2])


def test_nearer_than_every_solver_to_videos_that_were_not_seen() -> None:
    """Five steps of this flow, from other noise: at most a third of the error of the best solver."""

    def error(name: str, coefficients: Coefficients | None) -> float:
        table = solver_table(name, 1, 1.0, timesteps=LEVELS, coefficients=coefficients)
        ends = [(run(table, one), exact(one, np.zeros(1))[0]) for one in starts(500, 20)]
        return float(np.mean([(found - expected) ** 2 for found, expected in ends]))

    best = min(error(name, None) for name in ("unipc", "dpm++", "euler"))
    assert error("unipc", fitted(12)) < best / 3


def test_steps_have_as_many_vectors_as_there_are() -> None:
    found = np.array(fitted(2))
    assert found.shape == (len(LEVELS), 4)
    assert (found[0, 2:] == 0).all() and found[1, 3] == 0 and found[3:].all()
    assert fitted(2) == fitted(2)


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
