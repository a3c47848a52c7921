"""The transformer against diffusers' WanTransformer3DModel, every parameter random."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel

from helpers.fast_compile import fast_jit
from helpers.naive import load_params
from helpers.reference_models import randomise, relative_error
from wanbuild.mapping.transformer_rules import TRANSFORMER_RULES
from wanbuild.models import attention as attention_module
from wanbuild.models.attention import blocked_attention
from wanbuild.models.params import bind
from wanbuild.models.transformer import WanTransformer
from wanbuild.models.transformer_config import TransformerConfig

FLOAT32 = 5e-6  # seen: 3e-7; the reference's own float32 noise against float64 is 3e-7
BFLOAT16 = 2e-2  # seen: 6e-3; three layers of roundings of 4e-3 each


@dataclass(frozen=True)
class Pair:
    reference: Any
    params: dict[str, Any]
    forward: Any

    @classmethod
    def make(cls, reference: Any, module: WanTransformer, params: dict[str, Any]) -> Pair:
        def forward(params: Any, x: Any, timestep: Any, embeddings: Any, dtype: Any) -> Any:
            model = bind(module, params)
            kv, rope = model.prepare(embeddings, x.shape[2:], dtype)
            return model(x, timestep, kv, rope, {}, blocked_attention, dtype)

        return cls(reference, params, fast_jit(forward, static_argnums=4))


@pytest.fixture(scope="module")
def pair() -> Pair:
    config = TransformerConfig(2, 24, 64, 4, 32, freq_dim=64)
    reference = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        ffn_dim=64,
        num_layers=4,
        text_dim=32,
        freq_dim=64,
        in_channels=16,
        out_channels=16,
    ).eval()
    state = randomise(reference, seed=0)
    module = WanTransformer(config, jnp.float32)
    return Pair.make(reference, module, load_params(state, TRANSFORMER_RULES, module))


def inputs(
    batch: int, latent: tuple[int, int, int], prompts: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, 16, *latent)).astype(np.float32)
    return x, rng.standard_normal((prompts, 512, 32)).astype(np.float32)


def run(pair: Pair, x: np.ndarray, timestep: Any, embeddings: np.ndarray, dtype: Any = jnp.float32) -> Any:
    return pair.forward(pair.params, x, np.asarray(timestep, np.float32), embeddings, dtype)


def run_reference(pair: Pair, x: np.ndarray, timestep: Any, embeddings: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        one = isinstance(timestep, (int, float))
        times = torch.full((len(x),), timestep) if one else torch.from_numpy(timestep)
        return pair.reference(torch.from_numpy(x), times, torch.from_numpy(embeddings), return_dict=False)[
            0
        ].numpy()


@pytest.mark.thorough
@pytest.mark.parametrize("latent", [(1, 2, 6), (3, 6, 10), (4, 8, 2)])
@pytest.mark.parametrize("timestep", [999, 500, 13])
def test_float32(pair: Pair, latent: tuple[int, int, int], timestep: int) -> None:
    x, embeddings = inputs(2, latent, 2, seed=timestep)
    error = relative_error(run(pair, x, timestep, embeddings), run_reference(pair, x, timestep, embeddings))
    assert error < FLOAT32


def test_fractional_timestep(pair: Pair) -> None:
    """Euler's timesteps are not whole."""
    x, embeddings = inputs(1, (2, 4, 6), 1, seed=1)
    error = relative_error(run(pair, x, 909.7, embeddings), run_reference(pair, x, 909.7, embeddings))
    assert error < FLOAT32


@pytest.mark.thorough
@pytest.mark.parametrize("groups", ["frame", "token"])
def test_a_timestep_per_token(pair: Pair, groups: str) -> None:
    """The reference takes one per token; ours one for each group of tokens in a row, here all different."""
    latent, tokens = (3, 4, 6), 3 * 2 * 3
    count = 3 if groups == "frame" else tokens
    x, embeddings = inputs(2, latent, 2, seed=6)
    timesteps = np.random.default_rng(6).uniform(0, 1000, (2, count)).astype(np.float32)
    reference = run_reference(pair, x, np.repeat(timesteps, tokens // count, axis=1), embeddings)
    assert relative_error(run(pair, x, timesteps, embeddings), reference) < FLOAT32
    shared = run(pair, x, timesteps[:1], embeddings)  # one row of them for the whole batch
    repeated = run_reference(pair, x, np.repeat(timesteps[[0, 0]], tokens // count, axis=1), embeddings)
    assert relative_error(shared, repeated) < FLOAT32
    assert relative_error(shared, reference) > 100 * FLOAT32


def test_videos_share_a_prompt(pair: Pair) -> None:
    """Three videos a prompt attend to one set of keys, in the order of the doubled batch."""
    x, embeddings = inputs(6, (2, 4, 6), 2, seed=2)
    reference = run_reference(pair, x, 700, np.repeat(embeddings, 3, axis=0))
    assert relative_error(run(pair, x, 700, embeddings), reference) < FLOAT32


def test_query_blocks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in many small query blocks is the same attention."""
    x, embeddings = inputs(1, (3, 6, 10), 1, seed=3)
    whole = run(pair, x, 400, embeddings)
    jax.clear_caches()
    monkeypatch.setattr(attention_module, "SCORES_BYTES", 4 * 45 * 7)
    assert relative_error(run(pair, x, 400, embeddings), whole) < 1e-6  # sums of the same terms


def test_bfloat16(pair: Pair) -> None:
    x, embeddings = inputs(2, (3, 6, 10), 2, seed=4)
    error = relative_error(
        run(pair, x, 500, embeddings, jnp.bfloat16), run_reference(pair, x, 500, embeddings)
    )
    assert 1e-4 < error < BFLOAT16


@pytest.mark.parametrize(
    "path",
    ["blocks/attn1/norm_q/weight", "blocks/attn2/norm_k/weight", "blocks/norm2/bias", "scale_shift_table"],
)
def test_every_parameter_matters(pair: Pair, path: str) -> None:
    """The comparison sees a parameter that is left at its initial value: it can fail."""
    x, embeddings = inputs(1, (2, 4, 6), 1, seed=5)
    params = jax.tree.map(np.array, pair.params)
    *parents, name = path.split("/")
    node = params
    for key in parents:
        node = node[key]
    node[name][...] = 1.0 if "norm_" in path else 0.0
    wrong = run(dataclasses.replace(pair, params=params), x, 500, embeddings)
    assert relative_error(wrong, run_reference(pair, x, 500, embeddings)) > 100 * FLOAT32
