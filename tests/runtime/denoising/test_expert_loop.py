"""The loop over steps with small programs: several in one schedule, and two experts."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers.small_loop import CHEAP, FULL, MAX_STEPS, SCALES, SHAPE, SmallLoader, small_loader
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.expert_loop import ExpertLoop
from wanrun.denoising.noise import initial_noise
from wanrun.denoising.schedule import ExpertRange
from wanrun.denoising.solvers import COLUMNS, SolverTable, solver_table
from wanrun.errors import WanError
from wanrun.timing import Timings

NOISE = initial_noise(3, SHAPE)
RANGES = (ExpertRange("transformer", 0, 5, 1.0), ExpertRange("transformer_2", 5, 8, 1.0))
REUSED = {2, 3, 6}
"""Steps that take the velocity of the step before."""


def denoise(
    loader: SmallLoader, table: SolverTable, loop: str, ranges: Sequence[ExpertRange] = RANGES, **options: Any
) -> np.ndarray:
    profile: Any = types.SimpleNamespace(guidance=False, options={"max_steps": MAX_STEPS})
    expert_loop = ExpertLoop(loader, profile, tuple(SCALES), "both")  # type: ignore[arg-type]
    empty = np.empty(0)
    return expert_loop(NOISE, table, ranges, empty, Conditions(), loop, Timings(), **options)


def in_numpy(table: SolverTable, reused: set[int]) -> np.ndarray:
    """The same in float64, with the recurrence of wanrun.denoising.solvers."""
    x, v = NOISE.astype(np.float64), np.zeros(SHAPE)
    last = m1 = m2 = np.zeros(SHAPE)
    for index, row in enumerate(table.coefficients.astype(np.float64)):
        c = dict(zip(COLUMNS, row, strict=True))
        if index not in reused:
            scale = SCALES["transformer" if index < RANGES[0].last else "transformer_2"]
            v = scale * np.tanh(x) + table.timesteps[index] / 1000
        m0 = x - c["sigma"] * v
        last = c["c_x"] * x + c["c_last"] * last + c["c_0"] * m0 + c["c_1"] * m1 + c["c_2"] * m2
        x, m1, m2 = c["p_x"] * last + c["p_0"] * m0 + c["p_1"] * m1, m0, m1
    return x


@pytest.mark.parametrize("loop", ["step", "scan"])
@pytest.mark.parametrize("solver", ["unipc", "euler"])
def test_one_program_takes_all_steps(loop: str, solver: str) -> None:
    loader, table = small_loader(), solver_table(solver, 8, 5.0)
    found = denoise(loader, table, loop)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, in_numpy(table, set()), rtol=0, atol=2e-6)
    names = [(name, steps.transformer) for steps in RANGES for name in ("prepare", FULL[loop])]
    assert loader.bound_names == names


@pytest.mark.parametrize("loop", ["step", "scan"])
def test_a_rule_mixes_programs(loop: str) -> None:
    """The cheap one has state of its own, the last velocity, and takes no weights."""
    loader, table = small_loader(), solver_table("unipc", 8, 5.0)
    done: list[int] = []
    found = denoise(
        loader,
        table,
        loop,
        rule=lambda index: (CHEAP if index in REUSED else FULL)[loop],
        on_step=lambda step, total: done.append(step),
    )
    np.testing.assert_allclose(found, in_numpy(table, REUSED), rtol=0, atol=2e-6)
    assert np.abs(found - in_numpy(table, set())).max() > 1e-2  # that it was reused is seen
    assert set(loader.bound_names) >= {(FULL[loop], "transformer_2"), (CHEAP[loop], None)}
    # In the scan form steps in a row with one program are one call, which does not go past an expert.
    assert done == ([1, 2, 3, 4, 5, 6, 7, 8] if loop == "step" else [2, 4, 5, 6, 7, 8])


def test_both_forms_are_the_same() -> None:
    table = solver_table("dpm++", 8, 3.0)
    step, scan = (
        denoise(
            small_loader(), table, loop, rule=lambda index, loop=loop: (FULL, CHEAP)[index % 3 == 1][loop]
        )
        for loop in ("step", "scan")
    )
    np.testing.assert_allclose(step, scan, rtol=0, atol=1e-6)


@pytest.mark.parametrize("loop", ["step", "scan"])
def test_state_in_bfloat16(loop: str) -> None:
    """The dtype is that of the program's arguments."""
    table = solver_table("unipc", 8, 5.0)
    found = denoise(small_loader("bfloat16"), table, loop, rule=lambda index: FULL[loop])
    assert found.dtype == np.float32
    assert np.array_equal(found, found.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_allclose(found, in_numpy(table, set()), rtol=0, atol=5e-2)


def test_latents_that_are_not_finite() -> None:
    table = solver_table("euler", 8, 5.0)
    table.coefficients[0, 0] = np.inf
    for loop, when in (("step", "after the first step"), ("scan", "after 5 steps")):
        with pytest.raises(WanError, match=f"the latents are not finite {when}"):
            denoise(small_loader(), table, loop)
