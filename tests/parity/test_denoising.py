"""Noise, experts of steps and solver tables against torch's generator and diffusers' schedulers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMapEulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchLCMScheduler,
    UniPCMultistepScheduler,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.whole_path import WITH_REFERENCE
from wanrun.denoising.noise import Noise, initial_noise
from wanrun.denoising.solvers import COLUMNS, SOLVERS, SolverTable, solver_table
from wanrun.denoising.state import with_noise
from wanrun.denoising.steps import expert_ranges

SEEDS = [0, 1, 42, 2**31, 2**32 - 1, 2**32, 2**32 + 42, 2**63, 2**64 - 1]
NOISE_SHAPES = [(n,) for n in (1, 2, 3, 7, 14, 15, 16, 17, 24, 31, 32, 33)] + [
    (),
    (1, 16, 3, 5, 7),
    (2, 48, 2, 9, 4),
    (1, 16, 2, 64, 65),  # past one chunk of the implementation, and not a multiple of it
]


def of_torch(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed)).numpy()


@pytest.mark.parametrize("shape", NOISE_SHAPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_torch(seed: int, shape: tuple[int, ...]) -> None:
    got, expected = initial_noise(seed, shape), of_torch(seed, shape)
    assert got.dtype == np.float32
    assert got.shape == shape
    # One float32 rounding of values up to 6: 4.8e-7 is the largest difference seen, in 40 million values.
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_equals_torch_over_many_values() -> None:
    shape = (1, 16, 21, 30, 52)
    got, expected = initial_noise(7, shape), of_torch(7, shape)
    assert np.abs(got - expected).max() <= 5e-7
    assert (got == expected).mean() > 0.75  # 83 % seen; a wrong rounding of the angle gives 45 %


@pytest.mark.parametrize("shape", [(1, 16, 3, 8, 12), (2, 16, 4, 10, 4), (1, 4, 3, 5, 6), (7, 5), (3,) * 4])
def test_one_generator_gives_array_after_array(shape: tuple[int, ...]) -> None:
    """As a run takes them: initial noise, the noise of each step, the next window's initial noise."""
    draw, generator = Noise(11), torch.Generator("cpu").manual_seed(11)
    for _ in range(6):
        expected = torch.randn(shape, generator=generator).numpy()
        np.testing.assert_allclose(draw(shape), expected, rtol=0, atol=1e-6)


EXPERTS = ("transformer", "transformer_2")


def by_the_reference(solver: str, steps: int, shift: float, boundary: float) -> list[str]:
    """The expert of each step as diffusers' loop chooses it: tensors of its schedulers' own dtype."""
    table = solver_table(solver, steps, shift)
    kind = torch.int64 if solver in ("unipc", "dpm++") else torch.float32
    timesteps = torch.from_numpy(table.timesteps).to(kind)
    return [EXPERTS[0] if t >= boundary * 1000 else EXPERTS[1] for t in timesteps]


@settings(deadline=None, max_examples=200)
@given(
    solver=st.sampled_from(WITH_REFERENCE),
    steps=st.integers(1, 60),
    shift=st.floats(1, 20),
    boundary=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.875, 0.9, 0.999, 1.0])),
)
def test_the_rule_of_the_reference(solver: str, steps: int, shift: float, boundary: float) -> None:
    table = solver_table(solver, steps, shift)
    options = {"boundary": boundary, "guidance_scale": 4.0, "guidance_scale_2": 3.0}
    parts = expert_ranges(table, EXPERTS, options, 1000)
    taken = [part.transformer for part in parts for _ in range(part.first, part.last)]
    assert taken == by_the_reference(solver, steps, shift, boundary)
    assert [part.first for part in parts] == [0, *(part.last for part in parts)][:-1]
    assert parts[-1].last == steps and all(part.first < part.last for part in parts)
    scales = {EXPERTS[0]: 4.0, EXPERTS[1]: 3.0}
    assert all(set(part.guidance_scales) == {scales[part.transformer]} for part in parts)


SHAPE = (1, 4, 3, 5, 6)


EXPLICIT: Sequence[Sequence[float]] = [
    (1000, 937.5, 833.33, 625),  # Lightning and lightx2v at shift 5
    (1000, 757, 522),  # CausVid, FastWan
    (987.65, 933.78, 852.90, 608.98),  # rCM
    (999.5,),
    tuple(range(1000, 0, -20)),
]


def reference(name: str, num_steps: int, shift: float, timesteps: Sequence[float] | None = None) -> Any:
    """The reference's scheduler, configured as Wan pipelines do.

    Args:
        name: of the solver.
        num_steps: steps on the class's own grid.
        shift: of that grid.
        timesteps: explicit ones. Each class has another way to take them, and one shifts what it takes.
    """
    shift = shift if timesteps is None else 1.0
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    scheduler: Any = {
        "unipc": lambda: UniPCMultistepScheduler(solver_order=2, solver_type="bh2", **flow),
        "dpm++": lambda: DPMSolverMultistepScheduler(algorithm_type="dpmsolver++", solver_order=2, **flow),
        "euler": lambda: FlowMatchEulerDiscreteScheduler(shift=shift),
        "lcm": lambda: FlowMatchLCMScheduler(shift=shift),
        "flow-map": lambda: FlowMapEulerDiscreteScheduler(shift=shift),
    }[name]()
    if timesteps is None:
        scheduler.set_timesteps(num_steps)
    elif name == "unipc":
        scheduler.set_timesteps(sigmas=np.array(timesteps, np.float32).astype(np.float64) / 1000)
    elif name == "dpm++":  # takes no sigmas of a flow
        scheduler.set_timesteps(len(timesteps))
        scheduler.timesteps = torch.tensor(timesteps)
        scheduler.sigmas = torch.tensor([*timesteps, 0]) / 1000
    else:
        scheduler.set_timesteps(timesteps=np.array(timesteps, np.float32).tolist())
    scheduler.set_begin_index(0)  # as the pipelines do; without it a repeated timestep skips a step
    return scheduler


def rounded(sigmas: Any) -> np.ndarray:
    """One class keeps float64: its steps differ from those of float32 sigmas by less than an ulp."""
    return sigmas.numpy().astype(np.float32).astype(np.float64)  # type: ignore[no-any-return]


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


def run_table(table: SolverTable, dtype: type, seed: int) -> np.ndarray:
    """All noise is the seed's: the initial noise first, then that of the steps."""
    draw = Noise(seed)
    x: np.ndarray = draw(SHAPE).astype(dtype)
    v = model(seed)
    history = (np.zeros_like(x),) * 3
    for i, row in enumerate(table.coefficients.astype(dtype)):
        x, history = step(row, v(x, i), x, history)
        if table.noise.any():
            x = with_noise(x, table.noise[i], draw(SHAPE))
    return x


def run_reference(scheduler: Any, seed: int) -> np.ndarray:
    generator = torch.Generator("cpu").manual_seed(seed)
    x: Any = torch.randn(SHAPE, generator=generator)
    v = model(seed)
    more = {"generator": generator} if isinstance(scheduler, FlowMatchLCMScheduler) else {}
    for i, t in enumerate(scheduler.timesteps):
        x = scheduler.step(torch.from_numpy(v(x.numpy(), i)), t, x, return_dict=False, **more)[0]
    return x.numpy()


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 10, 30, 50])
@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_equals_the_reference(name: str, num_steps: int, shift: float) -> None:
    table, scheduler = solver_table(name, num_steps, shift), reference(name, num_steps, shift)

    np.testing.assert_array_equal(table.timesteps, scheduler.timesteps.numpy().astype(np.float32))
    np.testing.assert_array_equal(table.sigmas, rounded(scheduler.sigmas))
    # Both sides round in float32 at every step, and the reference computes its coefficients in it too:
    # at most 1.2e-6 was seen (N = 30, 50). A wrong sigma rounding shows as 6e-5 at N = 4.
    got, expected = run_table(table, np.float32, seed=num_steps), run_reference(scheduler, seed=num_steps)
    assert got.dtype == np.float32
    assert relative(got, expected) < 5e-6


@pytest.mark.parametrize("timesteps", EXPLICIT, ids=lambda timesteps: f"{timesteps[0]}-{len(timesteps)}")
@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_explicit_timesteps(name: str, timesteps: Sequence[float]) -> None:
    table, scheduler = solver_table(name, 7, 3.0, 1000, timesteps), reference(name, 0, 0, timesteps)
    np.testing.assert_array_equal(table.timesteps, np.array(timesteps, np.float32))
    np.testing.assert_array_equal(table.sigmas, rounded(scheduler.sigmas))
    got, expected = run_table(table, np.float32, seed=1), run_reference(scheduler, seed=1)
    assert relative(got, expected) < 5e-6


@pytest.mark.parametrize("shift", [1.0, 5.0, 8.0])
@pytest.mark.parametrize("num_steps", [1, 2, 4, 8])
def test_noise_of_the_steps_is_the_reference_s(num_steps: int, shift: float) -> None:
    """Nearer than for the others: a prediction and a noise are added up, and no history."""
    table, scheduler = solver_table("lcm", num_steps, shift), reference("lcm", num_steps, shift)
    got, expected = run_table(table, np.float32, seed=5), run_reference(scheduler, seed=5)
    assert relative(got, expected) < 1e-6
    if num_steps > 1:
        assert relative(run_table(table, np.float32, seed=6), expected) > 0.1  # another noise is seen


def test_as_near_to_float64_as_the_reference() -> None:
    """Rounding the table to float32 costs no more than the reference's own arithmetic does."""
    ours, reference_error = [], []
    for name in ("unipc", "dpm++", "euler"):
        for num_steps in (10, 30, 50):
            table = solver_table(name, num_steps, 5.0)
            rows = SOLVERS[name].rows(table.sigmas)
            exact_table = np.concatenate([table.sigmas[:-1, None], rows], axis=1)
            x, v = Noise(num_steps)(SHAPE).astype(np.float64), model(num_steps)
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
