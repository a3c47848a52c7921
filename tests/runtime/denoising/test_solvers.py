"""Solver tables against the reference's schedulers, run over all their steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)

from wanrun.denoising.solvers import COLUMNS, SOLVERS, SolverTable, solver_table
from wanrun.errors import UsageError

# The reference's DPM++ scheduler converts a tensor with NumPy's old protocol.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

SHAPE = (1, 4, 3, 5, 6)


def reference(name: str, num_steps: int, shift: float) -> Any:
    """The reference's scheduler, configured as Wan pipelines do."""
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    scheduler: Any = {
        "unipc": lambda: UniPCMultistepScheduler(solver_order=2, solver_type="bh2", **flow),
        "dpm++": lambda: DPMSolverMultistepScheduler(algorithm_type="dpmsolver++", solver_order=2, **flow),
        "euler": lambda: FlowMatchEulerDiscreteScheduler(shift=shift),
    }[name]()
    scheduler.set_timesteps(num_steps)
    scheduler.set_begin_index(0)  # as the pipelines do; without it a repeated timestep skips a step
    return scheduler


def step(row: np.ndarray, v: np.ndarray, x: np.ndarray, history: tuple[np.ndarray, ...]) -> Any:
    """The recurrence of wanrun.denoising.solvers, in the dtype of its arguments."""
    c = dict(zip(COLUMNS, row, strict=True))
    last, m1, m2 = history
    m0 = x - c["sigma"] * v
    last = c["c_x"] * x + c["c_last"] * last + c["c_0"] * m0 + c["c_1"] * m1 + c["c_2"] * m2
    return c["p_x"] * last + c["p_0"] * m0 + c["p_1"] * m1, (last, m0, m1)


def model(seed: int) -> Callable[[np.ndarray, int], np.ndarray]:
    """A nonlinear model of the sample and step, so that an error in any coefficient propagates."""
    random = np.random.default_rng(seed)
    bias = random.standard_normal((64, *SHAPE))

    def apply(x: np.ndarray, i: int) -> np.ndarray:
        wide = x.astype(np.float64)
        return (np.tanh(wide + 0.3 * np.roll(wide, 1)) + 0.7 * bias[i]).astype(x.dtype)

    return apply


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def run_table(table: SolverTable, dtype: type, seed: int) -> np.ndarray:
    x: np.ndarray = noise(seed).astype(dtype)
    v = model(seed)
    history = (np.zeros_like(x),) * 3
    for i, row in enumerate(table.coefficients.astype(dtype)):
        x, history = step(row, v(x, i), x, history)
    return x


def run_reference(scheduler: Any, seed: int) -> np.ndarray:
    x: Any = torch.from_numpy(noise(seed))
    v = model(seed)
    for i, t in enumerate(scheduler.timesteps):
        x = scheduler.step(torch.from_numpy(v(x.numpy(), i)), t, x, return_dict=False)[0]
    return x.numpy()


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 10, 30, 50])
@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_equals_the_reference(name: str, num_steps: int, shift: float) -> None:
    table, scheduler = solver_table(name, num_steps, shift), reference(name, num_steps, shift)

    np.testing.assert_array_equal(table.timesteps, scheduler.timesteps.numpy().astype(np.float32))
    np.testing.assert_array_equal(table.sigmas, scheduler.sigmas.numpy().astype(np.float64))
    # Both sides round in float32 at every step, and the reference computes its coefficients in it too:
    # at most 1.2e-6 was seen (N = 30, 50). A wrong sigma rounding shows as 6e-5 at N = 4.
    got, expected = run_table(table, np.float32, seed=num_steps), run_reference(scheduler, seed=num_steps)
    assert got.dtype == np.float32
    assert relative(got, expected) < 5e-6


def test_as_near_to_float64_as_the_reference() -> None:
    """Rounding the table to float32 costs no more than the reference's own arithmetic does."""
    ours, reference_error = [], []
    for name in SOLVERS:
        for num_steps in (10, 30, 50):
            table = solver_table(name, num_steps, 5.0)
            rows = SOLVERS[name][1](table.sigmas)
            exact_table = np.concatenate([table.sigmas[:-1, None], rows], axis=1)
            x, v = noise(num_steps).astype(np.float64), model(num_steps)
            history = (np.zeros_like(x),) * 3
            for i, row in enumerate(exact_table):
                x, history = step(row, v(x, i), x, history)
            ours.append(relative(run_table(table, np.float32, num_steps), x))
            reference_error.append(relative(run_reference(reference(name, num_steps, 5.0), num_steps), x))
    # Seen: at most 7.7e-7 and 7.4e-7. A factor of 3 is for luck in rounding on another CPU.
    assert max(ours) < 3 * max(reference_error) < 6e-6


@pytest.mark.parametrize("column", COLUMNS)
def test_the_comparison_would_notice_one_wrong_column(column: str) -> None:
    table = solver_table("unipc", 10, 5.0)
    expected = run_table(table, np.float32, seed=1)
    table.coefficients[:, COLUMNS.index(column)] *= np.float32(1 + 1e-3)
    assert relative(run_table(table, np.float32, seed=1), expected) > 1e-5


@pytest.mark.parametrize(
    ("name", "timesteps"),
    [
        ("unipc", [999, 937, 833, 625]),
        ("dpm++", [999, 937, 833, 624]),
        ("euler", [1000.0, 909.7, 717.3, 24.4]),
    ],
)
def test_grids_of_four_steps(name: str, timesteps: list[float]) -> None:
    np.testing.assert_allclose(solver_table(name, 4, 5.0).timesteps, timesteps, atol=0.05)


@pytest.mark.parametrize("name", sorted(SOLVERS))
@pytest.mark.parametrize("num_steps", [1, 2, 7, 100])
def test_table_layout(name: str, num_steps: int) -> None:
    table = solver_table(name, num_steps, 8.0)
    assert table.name == name
    assert table.coefficients.shape == (num_steps, len(COLUMNS)) == (num_steps, 9)
    assert table.coefficients.dtype == table.timesteps.dtype == np.float32
    assert table.coefficients.flags.c_contiguous
    assert table.timesteps.shape == (num_steps,)
    assert table.sigmas.shape == (num_steps + 1,)
    assert np.isfinite(table.coefficients).all()
    assert np.abs(table.coefficients).max() <= 1  # no cancellation of large terms in float32
    # The last step goes to sigma 0 and returns the prediction itself.
    np.testing.assert_array_equal(table.coefficients[-1, 6:], [0, 1, 0])
    assert table.sigmas[-1] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("heun", 4, 5.0), "unknown solver; expected unipc, dpm++, euler; found 'heun'"),
        (("unipc", 0, 5.0), "at least 1; found 0"),
        (("unipc", -3, 5.0), "at least 1; found -3"),
        (("euler", 4, 0.0), "positive number"),
        (("dpm++", 4, -1.0), "positive number"),
        (("unipc", 4, math.nan), "positive number"),
        (("unipc", 4, math.inf), "positive number"),
        (("unipc", 4, 5.0, 1), "training timesteps"),
        (("unipc", 50, 1e6), "not distinct in float32; use fewer steps"),
        (("dpm++", 4, 1e-45), "not distinct in float32"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        solver_table(*arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
