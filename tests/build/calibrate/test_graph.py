"""The graph: errors from scalar products, the shortest path, and better steps for a flow that is known."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from wanbuild.calibrate.graph import Recording, Weights, products_of
from wanrun.denoising.solvers import COLUMNS, SolverTable, solver_table

SPREAD = np.array([3.0, 1.0, 0.3, 0.1, 0.03])
"""Standard deviations of the data, whose flow is known: its clean prediction is linear in x."""


def predicted(x: np.ndarray, sigma: float) -> np.ndarray:
    """The mean of the clean data at x, of data and noise that are normal."""
    weight = (1 - sigma) * SPREAD**2 / ((1 - sigma) ** 2 * SPREAD**2 + sigma**2)
    return weight * x


def run(table: SolverTable, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs a table as the device does; returns what entered each step, its predictions, and the result."""
    last = m1 = m2 = np.zeros_like(x)
    entered, clean = [], []
    for row in table.coefficients.astype(np.float64):
        step = dict(zip(COLUMNS, row, strict=True))
        m0 = predicted(x, step["sigma"])
        entered.append(x)
        clean.append(m0)
        last = (
            step["c_x"] * x + step["c_last"] * last + step["c_0"] * m0 + step["c_1"] * m1 + step["c_2"] * m2
        )
        x = step["p_x"] * last + step["p_0"] * m0 + step["p_1"] * m1
        m1, m2 = m0, m1
    return np.stack(entered), np.stack(clean), x


def recording(solver: str, shift: float, nodes: list[int], noise: np.ndarray) -> Recording:
    table = solver_table(solver, 100, shift)
    entered, clean, final = run(table, noise)
    return Recording(table.sigmas[nodes], solver, products_of(entered[nodes], clean[nodes], final))


def noises(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(len(SPREAD))


@pytest.mark.parametrize("solver", ["unipc", "dpm++", "euler"])
def test_an_error_is_that_of_the_step_itself(solver: str) -> None:
    """Beside two steps of the solver's table over the same levels, from the recorded vectors."""
    table = solver_table(solver, 100, 3.0)
    entered, clean, final = run(table, noises(0))
    nodes = [0, 20, 50, 90]
    x, m = entered[nodes], clean[nodes]
    found = recording(solver, 3.0, nodes, noises(0))
    sigmas = table.sigmas[nodes]
    short = solver_table(solver, 1, 3.0, timesteps=tuple(sigmas * 1000))
    step, then = (
        dict(zip(COLUMNS, row.astype(np.float64), strict=True)) for row in short.coefficients[[1, 2]]
    )
    made = step["p_x"] * x[1] + step["p_0"] * m[1] + step["p_1"] * m[0]
    mended = then["c_x"] * made + then["c_last"] * x[1] + then["c_0"] * m[2]
    mended += then["c_1"] * m[1] + then["c_2"] * m[0]
    expected = [float(np.mean((one - x[2]) ** 2)) for one in (made, mended)]
    assert found._error([0, 1, 2]) == pytest.approx(expected, rel=1e-3)
    assert found._last() == pytest.approx(((m - final) ** 2).mean(1), rel=1e-6, abs=1e-12)


def test_the_path_is_the_shortest() -> None:
    nodes = [0, 10, 25, 45, 60, 75, 90, 99]
    found, sigmas = recording("unipc", 3.0, nodes, noises(1)), solver_table("unipc", 100, 3.0).sigmas[nodes]
    weights = Weights(0.5, 1.0)

    def cost(path: tuple[int, ...]) -> float:
        total = float(found._last()[path[-1]])
        for place, j in enumerate(path[1:], 1):
            before = [path[place - 2]] if place > 1 else []
            errors = found._error([*before, path[place - 1], j])
            total += (errors[1] + weights.predicted * errors[0]) * sigmas[j] ** (-2 * weights.power)
        return total

    for count in (2, 3, 5, 8):
        paths = [(0, *rest) for rest in combinations(range(1, len(nodes)), count - 1)]
        assert tuple(found.steps(count, weights)) == min(paths, key=cost)


def test_steps_for_a_known_flow() -> None:
    """Grids of a shift of 12 are far from good for this data: half the error is the least to ask for."""
    nodes = [*range(0, 100, 2), 99]
    table = solver_table("unipc", 100, 12.0)
    starts = [noises(seed) for seed in range(8)]
    runs = [run(table, start) for start in starts]
    products = np.mean([products_of(x[nodes], m[nodes], final) for x, m, final in runs], axis=0)
    found = Recording(table.sigmas[nodes], "unipc", products)

    def error(steps: SolverTable) -> float:
        others = [noises(seed) for seed in range(100, 120)]
        return float(np.mean([(run(steps, one)[2] - run(table, one)[2]) ** 2 for one in others]))

    for count in (6, 10, 15):
        path = found.steps(count, Weights(0.0, 1.0))
        chosen = solver_table("unipc", 1, 1.0, timesteps=tuple(table.sigmas[nodes][path] * 1000))
        assert len(path) == count and path[0] == 0 and (np.diff(path) > 0).all()
        assert error(chosen) < 0.5 * error(solver_table("unipc", count, 12.0))
