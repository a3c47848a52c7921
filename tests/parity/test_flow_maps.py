"""AnyFlow's and AnyFlow-FAR's steps against diffusers' own loops: each step knows where it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from helpers.compiling import fast_jit
from helpers.reference_models import Transformers, relative_error
from helpers.whole_path import LATENTS
from wanbuild.models.attention import blocked_attention
from wanbuild.models.params import bind
from wanrun.denoising.solvers import COLUMNS, SolverTable, solver_table

SHIFT, PARTITION = 5.0, (1, 3, 3, 3, 3, 2)


def expected(pair: Transformers, kind: str, noise: np.ndarray, text: np.ndarray, steps: int) -> np.ndarray:
    """What the pipeline of this class makes of noise."""
    scheduler = diffusers.FlowMapEulerDiscreteScheduler(shift=SHIFT)
    pipe = getattr(diffusers, kind)(None, None, pair.reference, None, scheduler)
    pipe.set_progress_bar_config(disable=True)
    made = pipe(
        prompt_embeds=torch.from_numpy(text),
        latents=torch.from_numpy(noise),
        num_frames=4 * noise.shape[2] - 3,
        height=8 * noise.shape[3],
        width=8 * noise.shape[4],
        num_inference_steps=steps,
        output_type="latent",
    )
    return made.frames.numpy()  # type: ignore[no-any-return]


def stepped(
    x: np.ndarray, table: SolverTable, velocity: Callable[..., Any], ends: np.ndarray | None = None
) -> np.ndarray:
    """The table's steps over velocities of latents, a timestep and where the step ends."""
    ends = table.next_timesteps if ends is None else ends
    for t, end, row in zip(table.timesteps, ends, table.coefficients, strict=True):
        c = dict(zip(COLUMNS, row, strict=True))
        clean = x - c["sigma"] * np.asarray(velocity(x, t, end))
        x = c["p_x"] * x + c["p_0"] * clean
    return x


@pytest.mark.parametrize("kind", ["r", "t-r"])
def test_any_number_of_steps(kind: str) -> None:
    pair, rng = Transformers("anyflow", seed=3, deltatime_type=kind), np.random.default_rng(4)
    noise = rng.standard_normal((2, 16, 2, 4, 6)).astype(np.float32)
    text = rng.standard_normal((2, 512, 32)).astype(np.float32)

    def velocity(x: Any, t: Any, end: Any) -> np.ndarray:
        return pair.ours(x, t, text, {"next_timestep": end})

    for steps in (1, 4, 7):
        table = solver_table("flow-map", steps, SHIFT)
        reference = expected(pair, "AnyFlowPipeline", noise, text, steps)
        assert relative_error(stepped(noise, table, velocity), reference) < LATENTS
        zero, later = np.zeros_like(table.next_timesteps), table.next_timesteps + 100
        assert relative_error(stepped(noise, table, velocity, zero), reference) > 100 * LATENTS or steps == 1
        assert relative_error(stepped(noise, table, velocity, later), reference) > 100 * LATENTS


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("rows", "columns"), [(8, 12), (16, 32)], ids=["filled", "whole"])
def test_chunks(rows: int, columns: int) -> None:
    """A video that is made chunk by chunk."""
    pair, rng = Transformers("anyflow-far", seed=3, chunk_partition=PARTITION), np.random.default_rng(4)
    frames = sum(PARTITION)
    noise = rng.standard_normal((1, 16, frames, rows, columns)).astype(np.float32)
    text = rng.standard_normal((1, 512, 32)).astype(np.float32)
    table = solver_table("flow-map", 2, SHIFT)
    reference = expected(pair, "AnyFlowFARPipeline", noise, text, 2)

    def velocity(params: Any, cache: Any, chunk: Any, x: Any, t: Any, end: Any) -> Any:
        model = bind(pair.module, params)
        kv, _ = model.prepare(text, x.shape[2:], jnp.float32)
        past, rope = model.beside(cache, chunk, x.shape[2:])
        kv = {"blocks": {**kv["blocks"], **past}}
        return model(x, t, kv, rope, {"next_timestep": end}, blocked_attention, jnp.float32)

    def remember(params: Any, cache: Any, chunk: Any, x: Any) -> Any:
        model = bind(pair.module, params)
        kv, _ = model.prepare(text, x.shape[2:], jnp.float32)
        return model.remember(cache, kv, x, chunk, blocked_attention, jnp.float32)

    forward, keep = fast_jit(velocity), fast_jit(remember)
    abstract = pair.module.cache((frames, rows, columns), jnp.float32)
    cache = {name: np.zeros(one.shape, one.dtype) for name, one in abstract.items()}
    made, first = [], 0
    for number, length in enumerate(PARTITION):
        chunk, x = np.int32(number), noise[:, :, first : first + length]
        made.append(stepped(x, table, lambda *given: forward(pair.params, cache, chunk, *given)))  # noqa: B023
        first += length
        filled = np.pad(made[-1], ((0, 0), (0, 0), (0, max(PARTITION) - length), (0, 0), (0, 0)))
        cache = keep(pair.params, cache, chunk, filled)
    assert relative_error(np.concatenate(made, 2), reference) < LATENTS
