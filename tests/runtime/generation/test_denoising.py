"""The loop over steps with small programs: several in one schedule, and two experts."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from helpers.manifests import plain_manifest
from helpers.small_loop import CHEAP, FULL, MAX_STEPS, SCALES, SHAPE, SmallPrograms, small_programs
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.noise import Noise, initial_noise
from wanrun.denoising.schedule import ExpertRange
from wanrun.denoising.solvers import COLUMNS, SolverTable, solver_table
from wanrun.denoising.steps import Denoising, StepContext, in_turn
from wanrun.errors import UsageError, WanError
from wanrun.generation.sampler import Draw, Sampler
from wanrun.timing.timings import Timings

SEED = 3
NOISE = initial_noise(SEED, SHAPE)
RANGES = (ExpertRange("transformer", 0, 5, 1.0), ExpertRange("transformer_2", 5, 8, 1.0))
REUSED = {2, 3, 6}
"""Steps that take the velocity of the step before."""


def denoise(
    programs: SmallPrograms,
    table: SolverTable,
    loop: str,
    ranges: Sequence[ExpertRange] = RANGES,
    draw: Draw = Noise(0),  # noqa: B008
    **options: Any,
) -> np.ndarray:
    profile: Any = types.SimpleNamespace(
        width=40,
        height=32,
        num_frames=9,
        num_videos=1,
        num_references=0,
        guidance=False,
        options=types.SimpleNamespace(max_steps=MAX_STEPS),
    )
    sampler = Sampler(cast(Any, programs), plain_manifest(), profile, cast(Any, None))
    run = Denoising(table, ranges, np.empty(0), loop, Timings(), **options)
    return sampler.denoise(run, NOISE, Conditions(), draw)


def after_the_initial_noise() -> Noise:
    """The generator of the seed, whose first array is ``NOISE``."""
    draw = Noise(SEED)
    draw(SHAPE)
    return draw


def in_numpy(table: SolverTable, reused: set[int]) -> np.ndarray:
    """The same in float64, with the recurrence of wanrun.denoising.solvers."""
    draw = after_the_initial_noise()
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
        if table.noise.any():
            x = x + table.noise[index].astype(np.float64) * draw(SHAPE)
    return x


@pytest.mark.parametrize("loop", ["step", "scan"])
@pytest.mark.parametrize("solver", ["unipc", "euler"])
def test_one_program_takes_all_steps(loop: str, solver: str) -> None:
    programs, table = small_programs(), solver_table(solver, 8, 5.0)
    found = denoise(programs, table, loop)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, in_numpy(table, set()), rtol=0, atol=2e-6)
    names = [(name, steps.transformer) for steps in RANGES for name in ("prepare", FULL[loop])]
    assert programs.bound_names == names


@pytest.mark.parametrize("loop", ["step", "scan"])
def test_a_rule_mixes_programs(loop: str) -> None:
    """The cheap one has state of its own, the last velocity, and takes no weights."""
    programs, table = small_programs(), solver_table("unipc", 8, 5.0)
    done: list[int] = []
    found = denoise(
        programs,
        table,
        loop,
        rule=lambda step: (CHEAP if step.index in REUSED else FULL)[loop],
        on_step=lambda step, total: done.append(step),
    )
    np.testing.assert_allclose(found, in_numpy(table, REUSED), rtol=0, atol=2e-6)
    assert np.abs(found - in_numpy(table, set())).max() > 1e-2  # that it was reused is seen
    assert set(programs.bound_names) >= {(FULL[loop], "transformer_2"), (CHEAP[loop], None)}
    # In the scan form steps in a row with one program are one call, which does not go past an expert.
    assert done == ([1, 2, 3, 4, 5, 6, 7, 8] if loop == "step" else [2, 4, 5, 6, 7, 8])


def test_both_forms_are_the_same() -> None:
    table = solver_table("dpm++", 8, 3.0)
    step, scan = (
        denoise(
            small_programs(),
            table,
            loop,
            rule=lambda step, loop=loop: (FULL, CHEAP)[step.index % 3 == 1][loop],
        )
        for loop in ("step", "scan")
    )
    np.testing.assert_allclose(step, scan, rtol=0, atol=1e-6)


@pytest.mark.parametrize("loop", ["step", "scan"])
def test_state_in_bfloat16(loop: str) -> None:
    """The dtype is that of the program's arguments."""
    table = solver_table("unipc", 8, 5.0)
    found = denoise(small_programs("bfloat16"), table, loop, rule=lambda step: FULL[loop])
    assert found.dtype == np.float32
    assert np.array_equal(found, found.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_allclose(found, in_numpy(table, set()), rtol=0, atol=5e-2)


def test_latents_that_are_not_finite() -> None:
    table = solver_table("euler", 8, 5.0)
    table.coefficients[0, 0] = np.inf
    for loop, when in (("step", "after the first step"), ("scan", "after 5 steps")):
        with pytest.raises(WanError, match=f"the latents are not finite {when}"):
            denoise(small_programs(), table, loop)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_noise_between_the_calls(dtype: str) -> None:
    """In both forms, and where a rule mixes programs; the scan form's calls are split at every step."""
    table, done = solver_table("lcm", 8, 5.0), []
    for loop in ("step", "scan"):
        for reused in (set(), REUSED):
            draw = after_the_initial_noise()
            found = denoise(
                small_programs(dtype),
                table,
                loop,
                draw=draw,
                rule=lambda step, loop=loop, reused=reused: (CHEAP if step.index in reused else FULL)[loop],
                on_step=lambda step, total: done.append(step),
            )
            # bfloat16 keeps 8 bits, and rounds twice where noise is added.
            tolerance = 2e-6 if dtype == "float32" else 5e-2
            np.testing.assert_allclose(found, in_numpy(table, reused), rtol=0, atol=tolerance)
            # The noise after the last step is drawn too: a next window begins where the reference's does.
            following = after_the_initial_noise()
            for _ in range(8):
                following(SHAPE)
            assert np.array_equal(draw(SHAPE), following(SHAPE))
    assert done == [*range(1, 9)] * 4


def test_noise_of_distilled_timesteps() -> None:
    """Explicit timesteps through both experts; another seed's noise is seen."""
    table = solver_table("lcm", 1, 1.0, 1000, [1000, 937.5, 833.33, 625])
    ranges = (ExpertRange("transformer", 0, 2, 1.0), ExpertRange("transformer_2", 2, 4, 1.0))
    step, scan = (
        denoise(small_programs(), table, loop, ranges, draw=after_the_initial_noise())
        for loop in ("step", "scan")
    )
    np.testing.assert_allclose(step, scan, rtol=0, atol=1e-6)
    assert np.abs(denoise(small_programs(), table, "step", ranges, draw=Noise(4)) - step).max() > 0.1


def test_a_solver_without_noise_draws_none() -> None:
    def draw(shape: Sequence[int]) -> np.ndarray:
        raise AssertionError("noise is drawn")

    table = solver_table("unipc", 8, 5.0)
    found = denoise(small_programs(), table, "step", draw=draw)
    np.testing.assert_allclose(found, in_numpy(table, set()), rtol=0, atol=2e-6)


@pytest.mark.parametrize("loop", ["step", "scan"])
def test_what_a_rule_knows(loop: str) -> None:
    """It is asked of every step but an expert's first; in the step form it sees the state before the step."""
    table, seen = solver_table("unipc", 8, 5.0), list[StepContext]()

    def rule(step: StepContext) -> str:
        seen.append(step)
        assert step.programs == (FULL[loop], CHEAP[loop])
        return in_turn(step)

    found = denoise(small_programs(), table, loop, rule=rule)
    np.testing.assert_allclose(found, in_numpy(table, {1, 3, 6}), rtol=0, atol=2e-6)
    assert [step.index for step in seen] == [1, 2, 3, 4, 6, 7]
    assert [step.first for step in seen] == [0] * 4 + [5] * 2
    assert [step.expert for step in seen] == ["transformer"] * 4 + ["transformer_2"] * 2
    for step in seen:
        assert (step.total, step.timestep) == (8, table.timesteps[step.index])
        assert step.sigma == pytest.approx(step.timestep / 1000, abs=1e-3)
    if loop == "scan":
        assert all(step.state is None for step in seen)
    else:
        states = [step.state for step in seen if step.state is not None]
        assert [state.keys() for state in states] == [{"latents", "history", "residual"}] * 6


@pytest.mark.parametrize("loop", ["step", "scan"])
def test_a_rule_that_names_no_program(loop: str) -> None:
    with pytest.raises(UsageError, match="the rule has chosen no program for step 1"):
        denoise(small_programs(), solver_table("euler", 8, 5.0), loop, rule=lambda step: "no")
