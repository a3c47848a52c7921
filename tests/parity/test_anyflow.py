"""AnyFlow against diffusers' AnyFlowPipeline: any number of steps, each of which knows where it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AnyFlowPipeline, AnyFlowTransformer3DModel, FlowMapEulerDiscreteScheduler

from helpers.artifacts import build_artifact, shared
from helpers.fast_compile import fast_jit
from helpers.former_names import as_first_uploaded
from helpers.naive import load_params
from helpers.reference_models import randomise, relative_error
from helpers.whole_path import LATENTS, Case, WholePath
from wanbuild.mapping.transformer_rules import TRANSFORMER_RULES
from wanbuild.models.anyflow import AnyFlowConfig, AnyFlowTransformer
from wanbuild.models.attention import blocked_attention
from wanbuild.models.params import bind
from wanbuild.toy.toy_checkpoint import write_toy
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.roles import forms_of
from wanrun.denoising.solvers import COLUMNS, solver_table

STEPS, SHIFT = (1, 4, 7), 5.0
FIELDS: Mapping[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 20,
    "ffn_dim": 56,
    "num_layers": 3,
    "text_dim": 32,
    "freq_dim": 64,
}


@pytest.mark.parametrize("kind", ["r", "t-r"])
def test_steps_of_the_transformer(kind: str) -> None:
    """The pipeline's own loop, and the solver's table over the velocities of ours."""
    fields = {**FIELDS, "gate_value": 0.3, "deltatime_type": kind}
    reference = AnyFlowTransformer3DModel(**fields).eval()
    module = AnyFlowTransformer(AnyFlowConfig(**fields), jnp.float32)
    params = load_params(randomise(reference, seed=3), TRANSFORMER_RULES, module)
    pipe = AnyFlowPipeline(None, None, reference, None, FlowMapEulerDiscreteScheduler(shift=SHIFT))
    pipe.set_progress_bar_config(disable=True)
    rng = np.random.default_rng(4)
    noise = rng.standard_normal((2, 16, 2, 4, 6)).astype(np.float32)
    embeddings = rng.standard_normal((2, 512, 32)).astype(np.float32)

    def velocity(params: Any, x: Any, t: Any, end: Any) -> Any:
        model = bind(module, params)
        kv, rope = model.prepare(embeddings, x.shape[2:], jnp.float32)
        return model(x, t, kv, rope, {"next_timestep": end}, blocked_attention, jnp.float32)

    forward = fast_jit(velocity)

    def made(steps: int, ends: Callable[[np.ndarray], np.ndarray] = lambda ends: ends) -> np.ndarray:
        table, x = solver_table("flow-map", steps, SHIFT), noise
        for t, end, row in zip(table.timesteps, ends(table.next_timesteps), table.coefficients, strict=True):
            c = dict(zip(COLUMNS, row, strict=True))
            clean = x - c["sigma"] * np.asarray(forward(params, x, t, end))
            x = c["p_x"] * x + c["p_0"] * clean
        return x

    for steps in STEPS:
        expected = pipe(
            prompt_embeds=torch.from_numpy(embeddings),
            latents=torch.from_numpy(noise),
            num_frames=5,
            height=32,
            width=48,
            num_inference_steps=steps,
            output_type="latent",
        ).frames.numpy()
        assert relative_error(made(steps), expected) < LATENTS
        assert relative_error(made(steps, np.zeros_like), expected) > 100 * LATENTS or steps == 1
        assert relative_error(made(steps, lambda ends: ends + 100), expected) > 100 * LATENTS


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, commands: Any) -> WholePath:
    checkpoint = shared(
        tmp_path_factory, "anyflow", lambda folder: write_toy(folder, "anyflow-wan2.1", flow_shift=SHIFT)
    )
    artifact = shared(
        tmp_path_factory,
        "anyflow-artifact",
        lambda folder: build_artifact(checkpoint, folder, guidance=(False,), loop="all"),
    )
    cases = {str(steps): Case(steps, seed=steps) for steps in STEPS}
    return WholePath((checkpoint, artifact), commands, tmp_path_factory.mktemp("made"), cases, scale=1.0)


@pytest.mark.thorough
def test_a_published_layout_is_converted_with_its_sampling(path: WholePath) -> None:
    model = read_manifest(path.artifact).model
    assert (model.variant, model.flow_map, model.options) == ("anyflow-wan2.1", True, {})
    found = model.defaults
    assert (found.solver, found.num_steps, found.guidance_scale) == ("flow-map", 4, 1.0)
    assert found.flow_shift == SHIFT and found.timesteps is None


@pytest.mark.thorough
@pytest.mark.parametrize("loop", forms_of("all"))
@pytest.mark.parametrize("steps", STEPS)
def test_any_number_of_steps_of_one_executable(
    path: WholePath, steps: int, loop: str, record_property: Callable[[str, object], None]
) -> None:
    path.check(str(steps), record_property, loop)


@pytest.mark.thorough
def test_the_reference_checks_it(path: WholePath, commands: Any, tmp_path: Path) -> None:
    """Each expert's velocity and the whole path, of a checkpoint as NVlabs uploaded it first."""
    source = as_first_uploaded(path.artifact.with_name("shared-anyflow"), tmp_path / "first")
    assert "final latents" in commands.succeeds(
        "wanbuild", "verify", "--artifact", path.artifact, "--source", source, "--steps", 2
    )
