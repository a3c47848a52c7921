"""The graph: errors from scalar products, the shortest path, and better levels for a flow that is known."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from helpers.known_flow import error, exact, fitted, predicted, starts
from wanbuild.calibrate.graph import Recording, products_of
from wanrun.denoising.solvers import solver_table

LEVELS = np.array([0.99, 0.9, 0.75, 0.6, 0.45, 0.3, 0.15, 0.05])


def vectors(levels: np.ndarray, first: int, count: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each start: latents and predictions at the levels, and the end."""
    given = [exact(start, np.append(levels, 0.0)) for start in starts(first, count)]
    return [
        (one[:-1], np.stack([predicted(x, s) for x, s in zip(one, levels, strict=False)]), one[-1])
        for one in given
    ]


def recording(levels: np.ndarray, count: int = 3) -> Recording:
    return Recording(levels, np.mean([products_of(*one) for one in vectors(levels, 0, count)], axis=0))


def least(given: list[np.ndarray], target: np.ndarray) -> float:
    found, *_ = np.linalg.lstsq(np.stack(given, axis=1), target, rcond=None)
    return float(np.mean((np.stack(given, axis=1) @ found - target) ** 2))


def test_an_error_is_the_least_distance() -> None:
    """Beside least squares over the recorded vectors themselves."""
    runs, found = vectors(LEVELS, 0, 3), recording(LEVELS)
    x, m = (np.concatenate([run[kind].astype(np.float64) for run in runs], axis=1) for kind in (0, 1))
    final = np.concatenate([run[2] for run in runs]).astype(np.float64)
    assert found._errors[0, 0, 3] == pytest.approx(least([x[0], m[0]], x[3]), rel=1e-6)
    assert found._errors[1, 2, 5] == pytest.approx(least([x[2], m[2], m[1]], x[5]), rel=1e-6)
    assert found._last[4, 6] == pytest.approx(least([x[6], m[6], m[4]], final), rel=1e-6)
    assert found._errors[2, 2, 5] > 1e20 and found._errors[2, 5, 4] > 1e20 and found._last[6, 4] > 1e20


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_the_path_is_the_shortest(power: float) -> None:
    found = recording(LEVELS)

    def cost(path: tuple[int, ...]) -> float:
        total = float(found._last[path[-2], path[-1]])
        for place, j in enumerate(path[1:], 1):
            error = found._errors[path[max(0, place - 2)], path[place - 1], j]
            total += error * LEVELS[j] ** (2 * power)
        return total

    for count in (2, 3, 5, 8):
        paths = [(0, *rest) for rest in combinations(range(1, len(LEVELS)), count - 1)]
        assert tuple(found.steps(count, power)) == min(paths, key=cost)


def test_levels_for_a_known_flow() -> None:
    """Steps fitted to a grid of shift 12, far from good for this data, lose at least twice as much."""
    levels = solver_table("unipc", 50, 12.0).sigmas[:-1]

    def lost(nodes: list[int]) -> float:
        timesteps = tuple(levels[nodes] * 1000)
        rows = fitted(levels[nodes], 6, lambda x: x)
        return error(solver_table("unipc", 1, 1.0, timesteps=timesteps, coefficients=rows))

    found = recording(levels, 6)
    for count in (5, 8):
        path = found.steps(count, 0.0)
        assert len(path) == count and path[0] == 0 and (np.diff(path) > 0).all()
        assert lost(path) < 0.5 * lost([*np.linspace(0, 49, count).round().astype(int)])
