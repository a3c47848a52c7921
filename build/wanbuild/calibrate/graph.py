"""The levels whose steps lose least along a converged run: a shortest path, found without running the model.

A converged run is recorded at its nodes: noise levels, with the latents x that entered the step there and the
prediction m of the clean latents. A step from node i to node j, after node h, ends at a combination of x_i,
m_i and m_h, and ``wanbuild.calibrate.fit`` will choose the one with the least squares. The least distance to
x_j follows from the scalar products of the recorded vectors. The products are summed over prompts; the
vectors themselves are not needed.

An error counts by its noise level: early ones grow on their way, late ones are seen as they are. How much
each counts depends on the model, so it is a choice, and the paths of several choices are compared by running
them (``wanbuild.calibrate.search``).
"""

from __future__ import annotations

import numpy as np

_FAR = 1e30

_LEAST = 1e-12
"""Share of the products' trace added to their diagonal: vectors of near nodes are nearly dependent."""


class Recording:
    """Scalar products of what was recorded at ``count`` nodes, N.

    ``sigmas`` is (N,) float64, falling; the levels of the nodes. ``products`` is (2N + 1, 2N + 1) float64,
    mean products of x_0..x_{N-1}, m_0..m_{N-1} and the final latents.
    """

    def __init__(self, sigmas: np.ndarray, products: np.ndarray) -> None:
        self._sigmas, self._products = sigmas, products
        self.count = len(sigmas)
        self._errors, self._last = self._all_errors()

    def steps(self, count: int, power: float) -> list[int]:
        """Returns the nodes of the path of ``count`` steps with the least sum of weighted errors.

        An error at noise level sigma counts sigma ** (2 * power). ``count`` is at least 2, at most the number
        of nodes.
        """
        n = self.count
        scale = self._sigmas ** (2 * power)
        cost = np.full((n, n), _FAR)
        cost[0, 1:] = self._errors[0, 0, 1:] * scale[1:]
        came = list[np.ndarray]()
        for _ in range(count - 2):
            total = cost[:, :, None] + self._errors * scale
            total[0, 0] = _FAR  # only the first step
            came.append(total.argmin(0))
            cost = total.min(0)
        cost = cost + self._last
        before, at = np.unravel_index(cost.argmin(), cost.shape)
        path = [int(at), int(before)]
        for found in reversed(came):
            path.append(int(found[path[-1], path[-2]]))
        return path[::-1]

    def _all_errors(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns mean squared errors of steps, (N, N, N) by (before, from, to), and of the last, (N, N)."""
        # Entry [0, 0, j] is the first step, which has none before it.
        n = self.count
        errors, last = np.full((n, n, n), _FAR), np.full((n, n), _FAR)
        errors[0, 0, 1:] = self._least(np.array([[0, n]]), np.arange(1, n))[0]
        for i in range(1, n):
            before = np.arange(i)
            given = np.stack([np.full(i, i), np.full(i, n + i), n + before], axis=1)
            found = self._least(given, np.append(np.arange(i + 1, n), 2 * n))
            errors[:i, i, i + 1 :], last[:i, i] = found[:, :-1], found[:, -1]
        return errors, last

    def _least(self, given: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Returns the least squared distances (M, T) of targets (T,) from combinations of vectors (M, K)."""
        products = self._products[given[:, :, None], given[:, None, :]]
        towards = self._products[given][:, :, targets]
        sizes = np.trace(products, axis1=1, axis2=2)[:, None, None]
        found = np.linalg.solve(products + _LEAST * sizes * np.eye(given.shape[1]), towards)
        return np.maximum(np.diag(self._products)[targets] - (towards * found).sum(1), 0.0)


def products_of(entered: np.ndarray, predicted: np.ndarray, final: np.ndarray) -> np.ndarray:
    """Returns the mean scalar products of a run's vectors, as ``Recording`` takes them.

    All are float32: the latents that entered each node (N, D), the clean latents that were predicted there
    (N, D), and the run's final latents (D,).
    """
    vectors = np.concatenate([entered, predicted, final[None]]).astype(np.float64)
    return np.asarray(vectors @ vectors.T / vectors.shape[1])
