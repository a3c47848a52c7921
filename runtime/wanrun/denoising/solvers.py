"""Solvers are tables: every supported sampler is the same recurrence with its own coefficients.

With v the model's output at the current sample x, and last, m1, m2 zero at first, one step is

    m0   = x - sigma·v                                          prediction of the clean sample
    last = c_x·x + c_last·last + c_0·m0 + c_1·m1 + c_2·m2       corrector
    x    = p_x·last + p_0·m0 + p_1·m1                           predictor
    m1, m2 = m0, m1

so that one device program serves every solver, step count and shift. The coefficients depend on the
sigmas alone: alpha = 1 - sigma, lambda = log(alpha / sigma). They are computed in float64 from sigmas
rounded to float32, because that is what the reference's samplers hold (diffusers 0.42.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from wanrun.errors import UsageError

COLUMNS = ("sigma", "c_x", "c_last", "c_0", "c_1", "c_2", "p_x", "p_0", "p_1")
"""The columns of a coefficient table; the names are those of the recurrence above."""


@dataclass(frozen=True, eq=False)
class SolverTable:
    """One solver on one grid of N steps.

    Attributes:
        name: the solver, a key of ``SOLVERS``.
        timesteps: (N,) float32, what the transformer is given; whole numbers but for ``euler``.
        coefficients: (N, 9) float32, C-contiguous, one row per step in the order of ``COLUMNS``.
        sigmas: (N + 1,) float64, noise levels, each a float32 value; the last one is 0.
    """

    name: str
    timesteps: np.ndarray
    coefficients: np.ndarray
    sigmas: np.ndarray


def solver_table(
    name: str, num_steps: int, flow_shift: float, num_train_timesteps: int = 1000
) -> SolverTable:
    """Computes the table of a solver.

    Args:
        name: ``unipc`` (UniPCMultistepScheduler: order 2, bh2), ``dpm++`` (DPMSolverMultistepScheduler:
            dpmsolver++, order 2, midpoint) or ``euler`` (FlowMatchEulerDiscreteScheduler), each on its
            own class's grid of flow sigmas.
        num_steps: denoising steps, at least 1.
        flow_shift: how far the grid is pushed towards high noise; positive.
        num_train_timesteps: the timestep of pure noise, at least 2.

    Raises:
        UsageError: if a value is out of range, or the grid is too fine for float32.
    """
    if name not in SOLVERS:
        raise UsageError("unknown solver", expected=", ".join(SOLVERS), found=repr(name))
    if num_steps < 1:
        raise UsageError("the number of steps is too small", expected="at least 1", found=num_steps)
    if not (math.isfinite(flow_shift) and flow_shift > 0):
        raise UsageError("the flow shift is out of range", expected="a positive number", found=flow_shift)
    if num_train_timesteps < 2:
        raise UsageError("too few training timesteps", expected="at least 2", found=num_train_timesteps)
    grid, rows = SOLVERS[name]
    with np.errstate(all="ignore"):  # a shift beyond float64 gives sigmas that are refused below
        sigmas, timesteps = grid(num_steps, float(flow_shift), num_train_timesteps)
    if not (np.diff(sigmas) < 0).all():
        raise UsageError(
            f"{num_steps} {name} steps at flow shift {flow_shift:g} are not distinct in float32",
            remedy="use fewer steps or a shift nearer to 1",
        )
    # float32 sigmas below 1 leave alpha exact and nonzero; only the final sigma has an infinite lambda.
    coefficients = np.zeros((num_steps, len(COLUMNS)))
    coefficients[:, 0] = sigmas[:-1]
    coefficients[:, 1:] = rows(sigmas)
    return SolverTable(name, timesteps.astype(np.float32), coefficients.astype(np.float32), sigmas)


def _shift(u: np.ndarray, shift: float) -> np.ndarray:
    return shift * u / (1 + (shift - 1) * u)


def _end_at_zero(sigmas: np.ndarray) -> np.ndarray:
    """Rounds to float32, appends the final 0, and returns float64."""
    return np.append(sigmas, 0).astype(np.float32).astype(np.float64)


def _unipc_grid(num_steps: int, shift: float, train: int) -> tuple[np.ndarray, np.ndarray]:
    sigmas = _shift(np.linspace(1, 1 / train, num_steps + 1)[:-1], shift)
    if abs(sigmas[0] - 1) < 1e-6:
        sigmas[0] -= 1e-6  # lambda would be infinite
    return _end_at_zero(sigmas), (sigmas * train).astype(np.int64)


def _dpm_grid(num_steps: int, shift: float, train: int) -> tuple[np.ndarray, np.ndarray]:
    sigmas = _shift((1 - np.linspace(1, 1 / train, num_steps + 1))[:0:-1], shift)
    return _end_at_zero(sigmas), (sigmas * train).astype(np.int64)


def _euler_grid(num_steps: int, shift: float, train: int) -> tuple[np.ndarray, np.ndarray]:
    # The class shifts its training grid when it is made, in float32, and the grid between that one's
    # ends again when the steps are set, in float64.
    ends = _shift(np.array([train, 1], np.float32) / np.float32(train), shift).astype(np.float64)
    unshifted = np.linspace(ends[0] * train, ends[1] * train, num_steps) / train
    sigmas = _end_at_zero(_shift(unshifted, shift))
    return sigmas, sigmas[:-1].astype(np.float32) * np.float32(train)


def _lambda(sigmas: np.ndarray) -> np.ndarray:
    """log(alpha / sigma) of (N + 1,) sigmas; the last, of sigma 0, is infinite."""
    return np.append(np.log(1 - sigmas[:-1]) - np.log(sigmas[:-1]), np.inf)


def _second_order(sigmas: np.ndarray, lam: np.ndarray, i: int) -> tuple[float, float, float]:
    """(p_x, p_0, p_1) of the two-step predictor from step i; UniP-2 and DPM++ 2M midpoint are the same."""
    h = lam[i + 1] - lam[i]
    q = (1 - sigmas[i + 1]) * np.expm1(-h)
    r = (lam[i - 1] - lam[i]) / h
    return sigmas[i + 1] / sigmas[i], -q * (1 - 0.5 / r), -0.5 * q / r


def _first_order(sigmas: np.ndarray, i: int) -> tuple[float, float, float]:
    """(p_x, p_0, p_1) of the one-step predictor, which is an Euler step of the flow.

    It is written without lambda, so that it holds at sigma 1 and 0 too:
    alpha'·(1 - exp(-h)) = alpha' - alpha·sigma'/sigma = 1 - sigma'/sigma.
    """
    ratio = sigmas[i + 1] / sigmas[i]
    return ratio, 1 - ratio, 0.0


def _corrector(sigmas: np.ndarray, lam: np.ndarray, i: int, order: int) -> tuple[float, ...]:
    """(c_x, c_last, c_0, c_1, c_2) of UniC at step i >= 1, after a predictor of that order (bh2)."""
    h = lam[i] - lam[i - 1]
    phi = np.expm1(-h)
    q = (1 - sigmas[i]) * phi
    c_last = sigmas[i] / sigmas[i - 1]
    if order == 1:
        return 0.0, c_last, -q / 2, -q / 2, 0.0
    r = (lam[i - 2] - lam[i - 1]) / h
    k = -phi / h - 1
    # rho solves [[1, 1], [r, 1]] rho = (b_1, b_2).
    b_1, b_2 = k / phi, 2 * (-k / h - 0.5) / phi
    rho_1 = (b_2 - b_1) / (r - 1)
    rho_2 = b_1 - rho_1
    return 0.0, c_last, -q * rho_2, -q * (1 - rho_1 / r - rho_2), -q * rho_1 / r


_NO_CORRECTOR = (1.0, 0.0, 0.0, 0.0, 0.0)


def _unipc_rows(sigmas: np.ndarray) -> np.ndarray:
    steps, lam = len(sigmas) - 1, _lambda(sigmas)
    # Order 1 at the first step, for want of history, and at the last, which goes to sigma 0.
    orders = [min(2, i + 1, steps - i) for i in range(steps)]
    return np.array(
        [
            (
                *(_corrector(sigmas, lam, i, orders[i - 1]) if i else _NO_CORRECTOR),
                *(_second_order(sigmas, lam, i) if orders[i] == 2 else _first_order(sigmas, i)),
            )
            for i in range(steps)
        ]
    )


def _dpm_rows(sigmas: np.ndarray) -> np.ndarray:
    steps, lam = len(sigmas) - 1, _lambda(sigmas)
    return np.array(
        [
            (
                *_NO_CORRECTOR,
                *(_second_order(sigmas, lam, i) if 0 < i < steps - 1 else _first_order(sigmas, i)),
            )
            for i in range(steps)
        ]
    )


def _euler_rows(sigmas: np.ndarray) -> np.ndarray:
    return np.array([(*_NO_CORRECTOR, *_first_order(sigmas, i)) for i in range(len(sigmas) - 1)])


_Grid = Callable[[int, float, int], tuple[np.ndarray, np.ndarray]]
_Rows = Callable[[np.ndarray], np.ndarray]

SOLVERS: Mapping[str, tuple[_Grid, _Rows]] = MappingProxyType(
    {
        "unipc": (_unipc_grid, _unipc_rows),
        "dpm++": (_dpm_grid, _dpm_rows),
        "euler": (_euler_grid, _euler_rows),
    }
)
"""By solver name: its grid of sigmas (N + 1,) with timesteps (N,), and its coefficient rows (N, 8)."""
