"""AnyFlow-FAR against diffusers' AnyFlowFARPipeline: a video that is made chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AnyFlowFARPipeline, AnyFlowFARTransformer3DModel, FlowMapEulerDiscreteScheduler
from safetensors.numpy import save_file

from helpers.artifacts import far_toy
from helpers.fast_compile import fast_jit
from helpers.loras import PUBLISHED, lora
from helpers.naive import load_params
from helpers.pictures import picture, pictures, write_folder
from helpers.reference_models import randomise, relative_error
from helpers.whole_path import LATENTS, PROMPT, Case, WholePath
from wanbuild.cli import wanbuild
from wanbuild.mapping.transformer_rules import TRANSFORMER_RULES
from wanbuild.models.anyflow_far import AnyFlowFARConfig, AnyFlowFARTransformer
from wanbuild.models.attention import blocked_attention
from wanbuild.models.params import bind
from wancli.console import run
from wanrun import load
from wanrun.artifact.manifest import read_manifest
from wanrun.denoising.solvers import COLUMNS, solver_table
from wanrun.media.inputs import Media

pytestmark = pytest.mark.thorough

STEPS, SHIFT, PARTITION = 2, 5.0, (1, 3, 3, 3, 3, 2)
FIELDS: Mapping[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 20,
    "ffn_dim": 56,
    "num_layers": 3,
    "text_dim": 32,
    "freq_dim": 64,
    "gate_value": 0.3,
    "chunk_partition": PARTITION,
}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("rows", "columns"), [(8, 12), (16, 32)], ids=["filled", "whole"])
def test_chunks_of_the_transformer(rows: int, columns: int) -> None:
    """The pipeline's own loop, and the solver's table over the velocities of ours."""
    reference = AnyFlowFARTransformer3DModel(**FIELDS).eval()
    module = AnyFlowFARTransformer(AnyFlowFARConfig(**FIELDS), jnp.float32)
    params = load_params(randomise(reference, seed=3), TRANSFORMER_RULES, module)
    pipe = AnyFlowFARPipeline(None, None, reference, None, FlowMapEulerDiscreteScheduler(shift=SHIFT))
    pipe.set_progress_bar_config(disable=True)
    rng = np.random.default_rng(4)
    frames = sum(PARTITION)
    noise = rng.standard_normal((1, 16, frames, rows, columns)).astype(np.float32)
    embeddings = rng.standard_normal((1, 512, 32)).astype(np.float32)
    expected = pipe(
        prompt_embeds=torch.from_numpy(embeddings),
        latents=torch.from_numpy(noise),
        num_frames=4 * frames - 3,
        height=8 * rows,
        width=8 * columns,
        num_inference_steps=STEPS,
        output_type="latent",
    ).frames.numpy()

    def velocity(params: Any, cache: Any, chunk: Any, x: Any, t: Any, end: Any) -> Any:
        model = bind(module, params)
        kv, _ = model.prepare(embeddings, x.shape[2:], jnp.float32)
        past, rope = model.beside(cache, chunk, x.shape[2:])
        kv = {"blocks": {**kv["blocks"], **past}}
        return model(x, t, kv, rope, {"next_timestep": end}, blocked_attention, jnp.float32)

    def remember(params: Any, cache: Any, chunk: Any, x: Any) -> Any:
        model = bind(module, params)
        kv, _ = model.prepare(embeddings, x.shape[2:], jnp.float32)
        return model.remember(cache, kv, x, chunk, blocked_attention, jnp.float32)

    forward, keep = fast_jit(velocity), fast_jit(remember)
    abstract = module.cache((frames, rows, columns), jnp.float32)
    cache = {name: np.zeros(one.shape, one.dtype) for name, one in abstract.items()}
    table, made, first = solver_table("flow-map", STEPS, SHIFT), [], 0
    for chunk, length in enumerate(PARTITION):
        x = noise[:, :, first : first + length]
        for t, end, row in zip(table.timesteps, table.next_timesteps, table.coefficients, strict=True):
            c = dict(zip(COLUMNS, row, strict=True))
            clean = x - c["sigma"] * np.asarray(forward(params, cache, np.int32(chunk), x, t, end))
            x = c["p_x"] * x + c["p_0"] * clean
        made.append(x)
        first += length
        filled = np.pad(x, ((0, 0), (0, 0), (0, max(PARTITION) - length), (0, 0), (0, 0)))
        cache = keep(params, cache, np.int32(chunk), filled)
    assert relative_error(np.concatenate(made, 2), expected) < LATENTS


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, commands: Any) -> WholePath:
    image = tmp_path_factory.mktemp("image") / "first.png"
    picture(96, 64).save(image)
    folder = write_folder(pictures(13, 96, 64), tmp_path_factory.mktemp("video") / "frames")
    cases = {
        "image": Case(STEPS, {"image": image}, seed=2),
        "video": Case(STEPS, {"video": folder}, seed=3),
    }
    size = (96, 64, 45)
    return WholePath(
        far_toy(tmp_path_factory), commands, tmp_path_factory.mktemp("made"), cases, size, scale=1.0
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_published_layout_is_made_chunk_by_chunk(
    path: WholePath, record_property: Callable[[str, object], None]
) -> None:
    model = read_manifest(path.artifact).model
    assert (model.variant, model.flow_map) == ("anyflow-far-wan2.1", True)
    assert model.chunks is not None and model.chunks.lengths(12) == (1, 3, 3, 3, 2)
    for case in path.cases:
        path.check(case, record_property, "chunks")


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_lora_changes_what_is_made_and_what_is_kept(path: WholePath, tmp_path: Path) -> None:
    """The reference computes all chunks anew by the changed weights. Live it is the same video."""
    pairs, adapter = tmp_path / "lora.safetensors", tmp_path / "adapter.safetensors"
    tensors = lora(PUBLISHED["diffusers"], read_manifest(path.artifact), seed=3)
    save_file({key: one for key, one in tensors.items() if ".lora_" in key}, pairs)
    assert run(wanbuild, ["lora", str(pairs), "--artifact", str(path.artifact), "-o", str(adapter)]) == 0
    case = path.cases["image"]
    how: Any = {"num_steps": STEPS, "seed": case.seed, "media": Media(**case.media)}
    how["lora"] = [{"name": str(adapter), "strength": 0.25}]
    with load(path.artifact, embeddings="none") as pipeline:
        made = pipeline.generate(PROMPT, **how)
        live = list(pipeline.live(PROMPT, max_frames=45, **how))
    assert np.array_equal(np.concatenate([chunk.latents for chunk in live], 2), made.latents)
    plain = path.theirs("image").latents
    path.reference.pipe.load_lora_weights(pairs, adapter_name="own")
    path.reference.pipe.set_adapters("own", 0.25)
    expected = path.run(case).latents
    path.reference.pipe.unload_lora_weights()
    assert relative_error(made.latents, expected) < LATENTS < 1e-1 < relative_error(expected, plain)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_the_reference_checks_it(path: WholePath, commands: Any) -> None:
    """The velocity of the first chunk; whole videos from text, and from an image of another size."""
    source = path.artifact.with_name("shared-anyflow-far")
    shown = commands.succeeds(
        "wanbuild", "verify", "--artifact", path.artifact, "--source", source, "--steps", 1
    )
    assert "latents (text)" in shown and "latents (image)" in shown
