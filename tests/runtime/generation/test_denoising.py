"""The loop over steps with small programs, and two experts."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import ml_dtypes
import msgspec
import numpy as np
import pytest

from helpers.manifests import plain_manifest
from helpers.refusals import refuses
from helpers.small_loop import FULL, MAX_STEPS, SCALES, SHAPE, SmallPrograms, small_programs
from wanrun.artifact import roles
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.noise import Noise, initial_noise
from wanrun.denoising.solvers import COLUMNS, SolverTable, solver_table
from wanrun.denoising.steps import Denoising, ExpertRange
from wanrun.errors import WanError
from wanrun.generation.sampler import Draw, Sampler
from wanrun.timing.timings import Timings

SEED = 3
NOISE = initial_noise(SEED, SHAPE)
RANGES = (ExpertRange.alike("transformer", 0, 5, 1.0), ExpertRange.alike("transformer_2", 5, 8, 1.0))


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
        num_prompts=1,
        options=types.SimpleNamespace(max_steps=MAX_STEPS, guiders=()),
    )
    sampler = Sampler(cast(Any, programs), plain_manifest(), profile, cast(Any, None))
    run = Denoising(table, ranges, np.empty(0), loop, Timings(), **options)
    return sampler.denoise(run, NOISE, Conditions(), draw)


def after_the_initial_noise() -> Noise:
    """The generator of the seed, whose first array is ``NOISE``."""
    draw = Noise(SEED)
    draw(SHAPE)
    return draw


def in_numpy(table: SolverTable) -> np.ndarray:
    """The same in float64, with the recurrence of wanrun.denoising.solvers."""
    draw = after_the_initial_noise()
    x = table.start * NOISE.astype(np.float64)
    last = m1 = m2 = np.zeros(SHAPE)
    for index, row in enumerate(table.coefficients.astype(np.float64)):
        c = dict(zip(COLUMNS, row, strict=True))
        scale = SCALES["transformer" if index < RANGES[0].last else "transformer_2"]
        v = scale * np.tanh(x) + table.timesteps[index] / 1000
        m0 = x - c["sigma"] * v
        last = c["c_x"] * x + c["c_last"] * last + c["c_0"] * m0 + c["c_1"] * m1 + c["c_2"] * m2
        x, m1, m2 = c["p_x"] * last + c["p_0"] * m0 + c["p_1"] * m1, m0, m1
        if table.noise.any():
            x = x + table.noise[index].astype(np.float64) * draw(SHAPE)
    return x


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "told"), [("step", [*range(1, 9)]), ("scan", [5, 8])])
@pytest.mark.parametrize("solver", ["unipc", "euler"])
def test_one_program_takes_all_steps(loop: str, told: list[int], solver: str) -> None:
    """In the scan form all steps of an expert are one call."""
    programs, table, done = small_programs(), solver_table(solver, 8, 5.0), list[int]()
    found = denoise(programs, table, loop, on_step=partial(_note, done))
    assert found.dtype == np.float32 and done == told
    np.testing.assert_allclose(found, in_numpy(table), rtol=0, atol=2e-6)
    names = [(name, steps.transformer) for steps in RANGES for name in ("prepare", FULL[loop])]
    assert programs.bound_names == names


def test_two_programs_that_make_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third step is another program's; both pass on one state, and are bound once for an expert."""
    programs, table = small_programs(), solver_table("unipc", 8, 5.0)
    other = msgspec.structs.replace(programs["denoise_step"], role="leave")
    both = dataclasses.replace(
        programs,
        records={**programs.records, "other_step": other},
        compiled={**programs.compiled, "other_step": programs.compiled["denoise_step"]},
        bound_names=[],
    )
    third = msgspec.structs.replace(roles.ROLES["leave"], makes=lambda index: index % 3 == 2)
    monkeypatch.setattr(roles, "ROLES", {**roles.ROLES, "leave": third})
    form = msgspec.structs.replace(roles.FORMS["step"], roles=("prepare", "step", "leave"))
    monkeypatch.setattr("wanrun.denoising.steps.FORMS", {"step": form})
    done: list[int] = []
    found = denoise(both, table, "step", on_step=partial(_note, done))
    assert done == [*range(1, 9)] and np.array_equal(found, denoise(programs, table, "step", maker="step"))
    names = ("prepare", "denoise_step", "other_step")  # steps 0 to 4, of which 2, and 5 to 7, of which 5
    ends = ("prepare", "other_step", "denoise_step")
    assert [name for name, _ in both.bound_names] == [*names, *ends]


@pytest.mark.parametrize("loop", ["step", "scan"])
def test_fitted_coefficients_and_a_scaled_start(loop: str) -> None:
    timesteps = (900.0, 800.0, 650.0, 500.0, 350.0, 200.0, 100.0, 30.0)
    fitted = np.random.default_rng(5).uniform(-0.5, 0.7, (8, 4))
    table = solver_table("rcm-ode", 8, 1.0, 1000, timesteps, fitted.tolist())
    assert table.start == table.sigmas[0] < 1
    x, (m1, m2) = table.start * NOISE.astype(np.float64), np.zeros((2, *SHAPE))
    for index, (a, b_0, b_1, b_2) in enumerate(fitted):
        scale = SCALES["transformer" if index < RANGES[0].last else "transformer_2"]
        m0 = x - table.sigmas[index] * (scale * np.tanh(x) + timesteps[index] / 1000)
        x, m1, m2 = a * x + b_0 * m0 + b_1 * m1 + b_2 * m2, m0, m1
    np.testing.assert_allclose(denoise(small_programs(), table, loop), x, rtol=0, atol=2e-6)


def _note(done: list[int], step: int, *_: Any) -> None:
    done.append(step)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["step", "scan"])
def test_state_in_bfloat16(loop: str) -> None:
    """The dtype is that of the program's arguments."""
    table = solver_table("unipc", 8, 5.0)
    found = denoise(small_programs("bfloat16"), table, loop)
    assert found.dtype == np.float32
    assert np.array_equal(found, found.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_allclose(found, in_numpy(table), rtol=0, atol=5e-2)


def test_latents_that_are_not_finite() -> None:
    table = solver_table("euler", 8, 5.0)
    table.coefficients[0, 0] = np.inf
    for loop, when in (("step", "first step"), ("scan", "5 steps")):
        with refuses("not_finite", WanError, what=when):
            denoise(small_programs(), table, loop)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_noise_between_the_calls(dtype: str) -> None:
    """In both forms; the scan form's calls are split at every step."""
    table, done = solver_table("lcm", 8, 5.0), []
    for loop in ("step", "scan"):
        draw = after_the_initial_noise()
        found = denoise(
            small_programs(dtype), table, loop, draw=draw, on_step=lambda step, *_: done.append(step)
        )
        # bfloat16 keeps 8 bits, and rounds twice where noise is added.
        tolerance = 2e-6 if dtype == "float32" else 5e-2
        np.testing.assert_allclose(found, in_numpy(table), rtol=0, atol=tolerance)
        # The noise after the last step is drawn too: a next window begins where the reference's does.
        following = after_the_initial_noise()
        for _ in range(8):
            following(SHAPE)
        assert np.array_equal(draw(SHAPE), following(SHAPE))
    assert done == [*range(1, 9)] * 2


def test_noise_of_distilled_timesteps() -> None:
    """Explicit timesteps through both experts; another seed's noise is seen."""
    table = solver_table("lcm", 1, 1.0, 1000, [1000, 937.5, 833.33, 625])
    ranges = (ExpertRange.alike("transformer", 0, 2, 1.0), ExpertRange.alike("transformer_2", 2, 4, 1.0))
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
    np.testing.assert_allclose(found, in_numpy(table), rtol=0, atol=2e-6)
