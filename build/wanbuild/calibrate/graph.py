"""The steps with the least error along a converged run: a shortest path, found without running the model.

A converged run is recorded at its nodes: noise levels, with the latents x that entered the step there and its
prediction m of the clean latents. A multistep solver that goes from node i to node j, after node h, combines
x_i, m_h, m_i and m_j by its table's coefficients. So its error at j, |combination - x_j|², follows from the
scalar products of the recorded vectors. The products are summed over prompts; the vectors are not kept.

An error counts more the less noise is left. How much more is not known, so ``Weights`` are a choice, and the
paths of several choices are compared by running them (``wanbuild.calibrate.search``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wanrun.denoising.solvers import COLUMNS, SOLVERS

_FAR = 1e30


@dataclass(frozen=True)
class Weights:
    """How errors count.

    Args:
        power: an error at noise level sigma counts sigma ** (-2 * power).
        predicted: share of the error before the solver's corrector, at which the model is asked.
    """

    power: float
    predicted: float


class Recording:
    """Scalar products of what was recorded at N nodes.

    Args:
        sigmas: (N,) float64, falling; the levels of the nodes.
        solver: name of the solver.
        products: (2N + 1, 2N + 1) float64, mean products of x_0..x_{N-1}, m_0..m_{N-1} and the final latents.

    Attributes:
        count: N.
    """

    def __init__(self, sigmas: np.ndarray, solver: str, products: np.ndarray) -> None:
        self._sigmas, self._solver, self._products = sigmas, solver, products
        self.count = len(sigmas)
        self._predicted, self._corrected = self._errors()

    def steps(self, count: int, weights: Weights) -> list[int]:
        """Returns the nodes of the path of ``count`` steps with the least sum of weighted errors.

        Args:
            count: at least 2, at most the number of nodes.
            weights: how errors count.
        """
        n = self.count
        errors = self._corrected + weights.predicted * self._predicted
        scale = self._sigmas ** (-2 * weights.power)
        cost = np.full((n, n), _FAR)
        cost[0, 1:] = errors[0, 0, 1:] * scale[1:]
        came = list[np.ndarray]()
        for _ in range(count - 2):
            total = cost[:, :, None] + errors * scale
            total[0, 0] = _FAR  # the first step alone
            came.append(total.argmin(0))
            cost = total.min(0)
        cost = cost + self._last()
        before, at = np.unravel_index(cost.argmin(), cost.shape)
        path = [int(at), int(before)]
        for found in reversed(came):
            path.append(int(found[path[-1], path[-2]]))
        return path[::-1]

    def _errors(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the mean squared errors (N, N, N) at node j of the step from i to j after h: of the
        predictor, and after the corrector. Entry [0, 0, j] is the first step, which has none before it."""
        n = self.count
        predicted, corrected = np.full((n, n, n), _FAR), np.full((n, n, n), _FAR)
        for j in range(1, n):
            predicted[0, 0, j], corrected[0, 0, j] = self._error([0, j])
            for i in range(1, j):
                for h in range(i):
                    predicted[h, i, j], corrected[h, i, j] = self._error([h, i, j])
        return predicted, corrected

    def _error(self, nodes: list[int]) -> tuple[float, float]:
        rows = SOLVERS[self._solver].rows(np.append(self._sigmas[nodes], 0.0))
        *_, h, i, j = [nodes[0], *nodes]
        n, place = self.count, len(nodes) - 2
        step = dict(zip(COLUMNS[1:], rows[place], strict=True))
        then = dict(zip(COLUMNS[1:], rows[place + 1], strict=True))
        vectors = [i, j, n + h, n + i, n + j]  # x_i, x_j, m_h, m_i, m_j
        made = np.array([step["p_x"], 0, step["p_1"], step["p_0"], 0])
        mended = then["c_x"] * made
        mended += [then["c_last"], 0, then["c_2"], then["c_1"], then["c_0"]]
        products = self._products[np.ix_(vectors, vectors)]
        exact = np.array([0, 1, 0, 0, 0])
        return tuple(float((one - exact) @ products @ (one - exact)) for one in (made, mended))  # type: ignore[return-value]

    def _last(self) -> np.ndarray:
        """Returns the mean squared error (N,) of a last step from each node: its prediction is the result."""
        n = self.count
        norms = np.diag(self._products)
        return norms[n : 2 * n] - 2 * self._products[n : 2 * n, -1] + norms[-1]


def products_of(entered: np.ndarray, predicted: np.ndarray, final: np.ndarray) -> np.ndarray:
    """Returns the mean scalar products of a run's vectors, as ``Recording`` takes them.

    Args:
        entered: (N, D) float32, the latents at each node.
        predicted: (N, D) float32, the clean latents that were predicted there.
        final: (D,) float32, the run's result.
    """
    vectors = np.concatenate([entered, predicted, final[None]]).astype(np.float64)
    return np.asarray(vectors @ vectors.T / vectors.shape[1])
