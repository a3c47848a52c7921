"""Solver tables: every supported sampler is the same recurrence with its own coefficients.

With v the model's output at the current sample x, and last, m1, m2 initially zero, one step is

    m0   = x - sigma·v                                          prediction of the clean sample
    last = c_x·x + c_last·last + c_0·m0 + c_1·m1 + c_2·m2       corrector
    x    = p_x·last + p_0·m0 + p_1·m1                           predictor
    m1, m2 = m0, m1
    x    = x + noise·e                                          e: standard normal, new in each step

So one device program serves every solver, step count and shift; the runtime adds the noise between calls.
Coefficients and noise weights depend only on the sigmas: alpha = 1 - sigma, lambda = log(alpha / sigma).
They are computed in float64 from sigmas rounded to float32, which the reference's samplers hold
(diffusers 0.42.1). Timesteps are the solver's own grid for a number of steps and a shift, or explicit
ones, at which a distilled model was trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np

from wanrun.errors import UsageError, field

COLUMNS = ("sigma", "c_x", "c_last", "c_0", "c_1", "c_2", "p_x", "p_0", "p_1")
"""The columns of a coefficient table, named as in the recurrence above."""

HISTORY = ("last", "m1", "m2")
"""The arrays that steps pass on besides the sample, named as in the recurrence above."""


@dataclass(frozen=True)
class StageStart:
    """The first step of a stage of a chunk: see ``wanrun.denoising.pyramid``.

    ``kept`` is the weight of the latents of the stage before, enlarged; 1 for the first stage. ``noise`` is
    the weight of the block noise that is added to them; 0 for the first stage.
    """

    step: int
    kept: float = 1.0
    noise: float = 0.0


@dataclass(frozen=True, eq=False)
class SolverTable:
    """One solver on one grid of N steps.

    Attributes:
        name: a key of ``SOLVERS``.
        timesteps: (N,) float32, the transformer's input.
        coefficients: (N, 9) float32, C-contiguous, one row per step in the order of ``COLUMNS``.
        sigmas: (N + 1,) float64, noise levels, each a float32 value; the last is 0.
        noise: (N,) float32, weight of the standard normal noise added to the sample after each step.
        start: weight of the initial noise, the first sample.
        skipped: how many steps before these are left out: a video begins at the first of ``sigmas``.
        starts: where the stages of a chunk begin, the first one's at step 0; empty if there are no stages.
    """

    name: str
    timesteps: np.ndarray
    coefficients: np.ndarray
    sigmas: np.ndarray
    noise: np.ndarray
    start: float = 1.0
    skipped: int = 0
    starts: tuple[StageStart, ...] = ()

    @property
    def next_timesteps(self) -> np.ndarray:
        """The timesteps at which the steps end, (N,) float32: those of the next ones, and 0."""
        return np.append(self.timesteps[1:], np.float32(0))

    def noise_after(self, index: int) -> float | None:
        """Returns the weight of the noise that is drawn after a step; None for none."""
        weight = float(self.noise[index])
        drawn = weight or (self.noise.any() and SOLVERS[self.name].draws_last)
        return weight if drawn else None


def solver_table(
    name: str,
    num_steps: int,
    flow_shift: float,
    num_train_timesteps: int = 1000,
    timesteps: Sequence[float] | None = None,
    coefficients: Sequence[Sequence[float]] | None = None,
    strength: float | None = None,
) -> SolverTable:
    """Computes a solver's table.

    Args:
        name: ``unipc`` (UniPCMultistepScheduler: order 2, bh2), ``dpm++`` (DPMSolverMultistepScheduler:
            dpmsolver++, order 2, midpoint), ``euler`` (FlowMatchEulerDiscreteScheduler) or ``lcm``
            (FlowMatchLCMScheduler: every step predicts the clean sample and adds new noise). ``dmd`` is lcm
            at the noise levels of training (CausVid, FastVideo). ``rcm-ode`` and ``rcm-sde`` are euler and
            lcm that begin with noise of the first sigma's size (NVlabs/rcm). ``flow-map`` is euler on the
            grid of FlowMapEulerDiscreteScheduler, which ends one step before sigma 0. ``self-forcing`` is lcm
            on that grid. Grids are those of the classes. ``unipc`` and ``dpm++`` round grid timesteps down to
            whole numbers.
        num_steps: at least 1.
        flow_shift: positive; a larger shift moves the grid towards high noise.
        num_train_timesteps: the timestep of pure noise, at least 2.
        timesteps: explicit timesteps instead of the class's grid: strictly decreasing, above 0, at most
            ``num_train_timesteps``. Their number is the number of steps, sigma is timestep /
            ``num_train_timesteps``, and ``num_steps`` and ``flow_shift`` are not used. For ``dmd`` sigma is
            the nearest of ``num_train_timesteps`` levels with that shift, as in its training. ``unipc``
            lowers a first sigma of 1 by 1e-6, as on its own grid.
        coefficients: (N, 4), with explicit timesteps: those of x, m0, m1 and m2 of steps fitted to a model,
            instead of the solver's.
        strength: of a video that the steps begin with, 0 to 1; None for all steps. The last int(N·strength)
            steps of a class's grid are left, like diffusers' WanVideoToVideoPipeline; of explicit timesteps
            those whose sigma is at most that of a grid at this strength. They begin without history.

    Raises UsageError if a value is out of range, the grid is too fine for float32, or no step is left.
    """
    if name not in SOLVERS:
        raise UsageError("unknown_name", "unknown solver", expected=", ".join(SOLVERS), found=repr(name))
    if num_train_timesteps < 2:
        raise UsageError(
            "out_of_range", "too few training timesteps", expected="at least 2", found=num_train_timesteps
        )
    solver = SOLVERS[name]
    if timesteps is None:
        sigmas, given = _own_grid(name, num_steps, flow_shift, num_train_timesteps)
    else:
        sigmas, given = _explicit_grid(timesteps, num_train_timesteps, solver, flow_shift)
    skipped = 0 if strength is None else _skipped(sigmas, strength, None if timesteps is None else flow_shift)
    sigmas, given = sigmas[skipped:], given[skipped:]
    # float32 sigmas below 1 leave alpha exact and nonzero. Lambda is infinite at sigma 0 and at sigma 1.
    with np.errstate(divide="ignore"):
        rows = solver.rows(sigmas) if coefficients is None else fitted_rows(_left(coefficients, skipped))
    table = np.column_stack([sigmas[:-1], rows]).astype(np.float32)
    noise = sigmas[1:] if solver.adds_noise else np.zeros(len(given))
    start = float(sigmas[0]) if solver.scales_start else 1.0
    return SolverTable(
        name, given.astype(np.float32), table, sigmas, noise.astype(np.float32), start, skipped
    )


def _skipped(sigmas: np.ndarray, strength: float, flow_shift: float | None) -> int:
    """Returns how many of the steps with sigmas (N + 1,) a video leaves out; explicit ones have a shift."""
    steps, name = len(sigmas) - 1, field("strength")
    if flow_shift is None:
        left, least = min(int(steps * strength), steps), f"at least 1 / {steps}"
    else:
        _check_shift(flow_shift)
        level = np.float32(_shift(np.array(strength), flow_shift))
        left, least = int(np.count_nonzero(sigmas[:-1] <= level)), f"sigmas of at most {level:.4g}"
    if not left:
        raise UsageError(
            "out_of_range",
            f"{name} {strength:g} leaves no step of {steps}",
            expected=least,
            found=None if flow_shift is None else f"the last one's is {sigmas[-2]:.4g}",
            remedy="raise it, or use more steps",
        )
    return steps - left


def _left(coefficients: Sequence[Sequence[float]], skipped: int) -> Sequence[Sequence[float]]:
    """Returns the rows of the steps that are left; the oldest history stands for what is missing."""
    if not skipped:
        return coefficients
    rows = [list(row) for row in coefficients[skipped:]]
    for row in rows[:1]:
        row[1:] = sum(row[1:]), 0.0, 0.0
    for row in rows[1:2]:
        row[2:] = row[2] + row[3], 0.0
    return rows


def _own_grid(
    name: str, num_steps: int, flow_shift: float, num_train_timesteps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns sigmas (N + 1,) and timesteps (N,) of a solver's class; arguments as in ``solver_table``."""
    if num_steps < 1:
        raise UsageError(
            "out_of_range", "the number of steps is too small", expected="at least 1", found=num_steps
        )
    _check_shift(flow_shift)
    with np.errstate(all="ignore"):  # a shift beyond float64 gives sigmas that are refused below
        sigmas, timesteps = SOLVERS[name].grid(num_steps, float(flow_shift), num_train_timesteps)
    if not (np.diff(sigmas) < 0).all():
        raise UsageError(
            "out_of_range",
            f"{num_steps} {name} steps at flow shift {flow_shift:g} are not distinct in float32",
            remedy="use fewer steps or a shift nearer to 1",
        )
    return sigmas, timesteps


def _check_shift(flow_shift: float) -> None:
    if not (math.isfinite(flow_shift) and flow_shift > 0):
        raise UsageError(
            "out_of_range", "the flow shift is out of range", expected="a positive number", found=flow_shift
        )


def _explicit_grid(
    timesteps: Sequence[float], num_train_timesteps: int, solver: Solver, flow_shift: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns sigmas (N + 1,) and timesteps (N,); timesteps are float32, the transformer's input dtype."""
    # The reference's classes divide in float32. Rounding the float64 quotient gives the same values.
    with np.errstate(over="ignore"):  # overflow gives infinity, which is refused
        given = np.array(timesteps, np.float32)
    falling = given.size > 0 and (np.diff(given) < 0).all()
    if not (falling and given[0] <= num_train_timesteps and given[-1] > 0):
        raise UsageError(
            "invalid_value",
            "the timesteps cannot be used",
            expected=f"at most {num_train_timesteps}, above 0, each below the one before in float32",
            found=_shown(timesteps),
        )
    sigmas = given.astype(np.float64) / num_train_timesteps
    if solver.trained_levels:
        _check_shift(flow_shift)
        sigmas = _nearest_levels(sigmas, flow_shift, num_train_timesteps)
    if solver.below_one:
        _lower_one(sigmas)
    sigmas = _end_at_zero(sigmas)
    if not (np.diff(sigmas) < 0).all():
        raise UsageError(
            "out_of_range",
            "the timesteps are too near to one another: their sigmas are not distinct in float32",
            found=_shown(timesteps),
            remedy="leave some of them out",
        )
    return sigmas, given


def _shown(timesteps: Sequence[float]) -> str:
    text = ", ".join(f"{timestep:.9g}" for timestep in timesteps[:8])
    return (text + ", ..." if len(timesteps) > 8 else text) or "none"


def _lower_one(sigmas: np.ndarray) -> None:
    """Lowers a first sigma of 1 by 1e-6, because its lambda would be infinite."""
    if abs(sigmas[0] - 1) < 1e-6:
        sigmas[0] -= 1e-6


def _shift(u: np.ndarray, shift: float) -> np.ndarray:
    return shift * u / (1 + (shift - 1) * u)


def _nearest_levels(sigmas: np.ndarray, shift: float, train: int) -> np.ndarray:
    """Returns for each sigma the nearest of the levels that a model with this shift was trained at."""
    with np.errstate(all="ignore"):  # a shift beyond float64 gives sigmas that are refused as equal
        place = train * sigmas / (shift - (shift - 1) * sigmas)
        above, below = (_shift(np.clip(one, 1, train) / train, shift) for one in (np.ceil(place), place // 1))
    return np.where(sigmas - below < above - sigmas, below, above)


def _end_at_zero(sigmas: np.ndarray) -> np.ndarray:
    """Rounds to float32, appends the final 0, and returns float64."""
    return np.append(sigmas, 0).astype(np.float32).astype(np.float64)


def _unipc_grid(num_steps: int, shift: float, train: int) -> tuple[np.ndarray, np.ndarray]:
    sigmas = _shift(np.linspace(1, 1 / train, num_steps + 1)[:-1], shift)
    _lower_one(sigmas)
    return _end_at_zero(sigmas), (sigmas * train).astype(np.int64)


def _dpm_grid(num_steps: int, shift: float, train: int) -> tuple[np.ndarray, np.ndarray]:
    sigmas = _shift((1 - np.linspace(1, 1 / train, num_steps + 1))[:0:-1], shift)
    return _end_at_zero(sigmas), (sigmas * train).astype(np.int64)


def _euler_grid(num_steps: int, shift: float, train: int) -> tuple[np.ndarray, np.ndarray]:
    # The class shifts its training grid in float32 when it is constructed. When the steps are set, it shifts
    # the grid between that grid's ends again, in float64.
    ends = _shift(np.array([train, 1], np.float32) / np.float32(train), shift).astype(np.float64)
    unshifted = np.linspace(ends[0] * train, ends[1] * train, num_steps) / train
    sigmas = _end_at_zero(_shift(unshifted, shift))
    return sigmas, sigmas[:-1].astype(np.float32) * np.float32(train)


def _flow_map_grid(num_steps: int, shift: float, train: int) -> tuple[np.ndarray, np.ndarray]:
    sigmas = _shift(np.linspace(1, 0, num_steps + 1)[:-1], shift)
    return _end_at_zero(sigmas), sigmas * train


def _lambda(sigmas: np.ndarray) -> np.ndarray:
    """Returns log(alpha / sigma) of (N + 1,) sigmas; the last, at sigma 0, is infinite."""
    return np.append(np.log(1 - sigmas[:-1]) - np.log(sigmas[:-1]), np.inf)


def _second_order(sigmas: np.ndarray, lam: np.ndarray, i: int) -> tuple[float, float, float]:
    """Returns (p_x, p_0, p_1) of the two-step predictor at step i; UniP-2 and DPM++ 2M midpoint agree."""
    h = lam[i + 1] - lam[i]
    q = (1 - sigmas[i + 1]) * np.expm1(-h)
    r = (lam[i - 1] - lam[i]) / h
    return sigmas[i + 1] / sigmas[i], -q * (1 - 0.5 / r), -0.5 * q / r


def _first_order(sigmas: np.ndarray, i: int) -> tuple[float, float, float]:
    """Returns (p_x, p_0, p_1) of the one-step predictor, an Euler step of the flow."""
    # This avoids lambda, so it holds at sigma 1 and 0 too: alpha'·(1 - exp(-h)) = alpha' - alpha·sigma'/sigma
    # = 1 - sigma'/sigma.
    ratio = sigmas[i + 1] / sigmas[i]
    return ratio, 1 - ratio, 0.0


def _corrector(sigmas: np.ndarray, lam: np.ndarray, i: int, order: int) -> tuple[float, ...]:
    """Returns (c_x, c_last, c_0, c_1, c_2) of UniC at step i >= 1, after a predictor of that order (bh2)."""
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


def _second_order_rows(sigmas: np.ndarray, corrected: bool) -> np.ndarray:
    steps, lam = len(sigmas) - 1, _lambda(sigmas)
    # Order 1 at the first step, which has no history, and at the last, which ends at sigma 0.
    orders = [min(2, i + 1, steps - i) for i in range(steps)]
    rows = []
    for i, order in enumerate(orders):
        corrector = _corrector(sigmas, lam, i, orders[i - 1]) if corrected and i else _NO_CORRECTOR
        predictor = _second_order(sigmas, lam, i) if order == 2 else _first_order(sigmas, i)
        rows.append((*corrector, *predictor))
    return np.array(rows)


def _euler_rows(sigmas: np.ndarray) -> np.ndarray:
    return np.array([(*_NO_CORRECTOR, *_first_order(sigmas, i)) for i in range(len(sigmas) - 1)])


def fitted_rows(coefficients: Sequence[Sequence[float]]) -> np.ndarray:
    """Returns the rows (N, 8) of x' = a x + b_0 m0 + b_1 m1 + b_2 m2, for (N, 4) of a, b_0, b_1 and b_2."""
    x, m_0, m_1, m_2 = np.array(coefficients, np.float64).T
    none = np.zeros_like(x)
    return np.column_stack([x, none, none, none, m_2, none + 1, m_0, m_1])


def _lcm_rows(sigmas: np.ndarray) -> np.ndarray:
    return np.array([(*_NO_CORRECTOR, 0.0, 1 - following, 0.0) for following in sigmas[1:]])


@dataclass(frozen=True)
class Solver:
    """The computation of a solver's table.

    Attributes:
        grid: returns the class's sigmas (N + 1,) and timesteps (N,) for N, shift and training timesteps.
        rows: returns coefficients (N, 8), all columns but sigma, for sigmas (N + 1,).
        below_one: whether a first sigma of 1 is lowered.
        adds_noise: whether noise of the next sigma's size is added after each step.
        draws_last: whether that noise is drawn after the last step too, where its size is 0: the next chunk
            or window has other noise then.
        trained_levels: whether explicit timesteps have the nearest noise levels of training.
        scales_start: whether the initial noise has the first sigma's size, instead of 1.
    """

    grid: Callable[[int, float, int], tuple[np.ndarray, np.ndarray]]
    rows: Callable[[np.ndarray], np.ndarray]
    below_one: bool = False
    adds_noise: bool = False
    draws_last: bool = True
    trained_levels: bool = False
    scales_start: bool = False


SOLVERS: Mapping[str, Solver] = MappingProxyType(
    {
        "unipc": Solver(_unipc_grid, partial(_second_order_rows, corrected=True), below_one=True),
        "dpm++": Solver(_dpm_grid, partial(_second_order_rows, corrected=False)),
        "euler": Solver(_euler_grid, _euler_rows),
        "lcm": Solver(_euler_grid, _lcm_rows, adds_noise=True),  # both classes have the same grid
        "dmd": Solver(_euler_grid, _lcm_rows, adds_noise=True, trained_levels=True),
        "rcm-ode": Solver(_euler_grid, _euler_rows, scales_start=True),
        "rcm-sde": Solver(_euler_grid, _lcm_rows, adds_noise=True, scales_start=True),
        "flow-map": Solver(_flow_map_grid, _euler_rows),
        "self-forcing": Solver(_flow_map_grid, _lcm_rows, adds_noise=True, draws_last=False),
    }
)
"""By name."""
