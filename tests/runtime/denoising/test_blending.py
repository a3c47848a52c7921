"""Windows that are blended: a loop over blended predictions, for every solver and the real programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wanrun.denoising.blending import Blending
from wanrun.denoising.noise import Noise
from wanrun.denoising.solvers import SOLVERS, SolverTable, solver_table
from wanrun.denoising.steps import Denoising, ExpertRange, velocity_table
from wanrun.generation.load import load
from wanrun.timing.timings import Timings

WINDOWS = Blending(total=8, length=4, overlap=2)
SHAPE = (1, 2, 8, 3, 4)
Predict = Callable[[np.ndarray, float], np.ndarray]


def update(x: np.ndarray, v: np.ndarray, past: tuple[np.ndarray, ...], row: np.ndarray) -> tuple[Any, Any]:
    """One step of the recurrence of ``wanrun.denoising.solvers``."""
    sigma, c_x, c_last, c_0, c_1, c_2, p_x, p_0, p_1 = row
    last, m1, m2 = past
    m0 = x - sigma * v
    last = c_x * x + c_last * last + c_0 * m0 + c_1 * m1 + c_2 * m2
    return p_x * last + p_0 * m0 + p_1 * m1, (last, m0, m1)


def blend(windows: Blending, predict: Predict, x: np.ndarray, timestep: float) -> np.ndarray:
    """The windows' predictions, each counted by its weights."""
    v = np.zeros_like(x)
    for start, weights in zip(windows.starts, windows.weights, strict=True):
        v[:, :, windows.of(start)] += weights[:, None, None] * predict(x[:, :, windows.of(start)], timestep)
    return v


def own_loop(
    windows: Blending, predict: Predict, table: SolverTable, x: np.ndarray, draw: Noise
) -> np.ndarray:
    past = (np.zeros_like(x),) * 3
    for row, timestep, weight in zip(table.coefficients, table.timesteps, table.noise, strict=True):
        x, past = update(x, blend(windows, predict, x, timestep), past, row)
        x = x + weight * draw(x.shape) if table.noise.any() else x
    return x


def predicted(x: np.ndarray, timestep: float) -> np.ndarray:
    """A prediction that depends on the place in the window, and is not linear."""
    places = np.arange(x.shape[2], dtype=np.float32)[:, None, None]
    return np.tanh(x + x.mean() + places) * np.float32(0.3) + np.float32(timestep / 2000)


@pytest.mark.parametrize("solver", SOLVERS)
def test_blended_states_are_steps_of_blended_predictions(solver: str) -> None:
    table = solver_table(solver, 6, 3.0)

    def make(latents: Any, history: Any, row: np.ndarray, timestep: float) -> Any:
        x, past = update(latents, predicted(latents, timestep), tuple(history.values()), row)
        return {"latents": x, "history": dict(zip(history, past, strict=True))}

    step = WINDOWS.blended(make, ("latents", "history"))
    noise = Noise(1)(SHAPE)
    state: Any = {"latents": noise, "history": dict.fromkeys(("last", "m1", "m2"), np.zeros_like(noise))}
    draw = Noise(2)
    for row, timestep, weight in zip(table.coefficients, table.timesteps, table.noise, strict=True):
        state = step(**state, row=row, timestep=timestep)
        if table.noise.any():
            state["latents"] = state["latents"] + weight * draw(SHAPE)
    expected = own_loop(WINDOWS, predicted, table, noise, Noise(2))
    np.testing.assert_allclose(state["latents"], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("total", "overlap"), [(4, 1), (5, 1), (8, 2), (9, 3), (17, 2)])
def test_weights_and_windows(total: int, overlap: int) -> None:
    windows = Blending(total, 4, overlap)
    sums, counts = np.zeros(total), np.zeros(total, int)
    for start, weights, first in zip(windows.starts, windows.weights, windows.firsts, strict=True):
        sums[windows.of(start)] += weights
        counts[start + first : start + 4] += 1
    np.testing.assert_allclose(sums, 1, atol=1e-6)
    assert (counts == 1).all() and windows.starts[-1] == total - 4
    if total == 4:
        assert (windows.weights == 1).all()


@pytest.mark.slow
def test_a_video_of_windows_is_a_loop_over_blended_predictions(two_experts_artifact: Path) -> None:
    """Of the programs: 17 frames, where the profile has 9; in both forms of the loop, of two experts."""
    options: dict[str, Any] = {"num_steps": 3, "seed": 3, "num_frames": 17, "window_overlap": 4}
    options["boundary"] = 0.95
    with load(two_experts_artifact, prompts=["a fox", ""]) as pipeline:
        step = pipeline.generate("a fox", "", **options, loop="step")
        scan = pipeline.generate("a fox", "", **options, loop="scan")
        plain = pipeline.generate("a fox", "", num_steps=1)
        one = pipeline.generate("a fox", "", num_steps=1, num_frames=9, window_frames=9)
        generation = pipeline.resolve("a fox", "", **options)
        session, embeddings = pipeline.session(pipeline.profile), pipeline.encode_prompts(["a fox", ""])
        table, conditions = generation.table, session.conditioning(None, timings=Timings())
        experts = {
            timestep: ExpertRange.alike(part.transformer, 0, 1, part.guidance_scales[0])
            for part in generation.ranges
            for timestep in table.timesteps[part.first : part.last]
        }

        def predict(x: np.ndarray, timestep: float) -> np.ndarray:
            ranges = [experts[timestep]]
            run = Denoising(velocity_table(timestep), ranges, embeddings, "step", Timings())
            return x - session.denoise(run, np.ascontiguousarray(x), conditions, Noise(0))

        windows = generation.blending
        assert windows == Blending(5, 3, 1) and len(generation.ranges) == 2
        noise = Noise(3)(generation.latents_shape)
        final = own_loop(windows, predict, table, noise, Noise(0))
        frames = session.decode(final, Timings())[0]
    np.testing.assert_allclose(step.latents, final, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(step.frames, scan.frames)
    assert step.frames.shape[1] == step.options["num_frames"] == 17
    assert np.abs(step.frames.astype(int) - frames).max() <= 1
    np.testing.assert_array_equal(one.frames, plain.frames)
    assert "window_frames" not in one.options
