"""Layers of 8 bits: diffusers and transformers, fed with what the stored values stand for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import UMT5Config, UMT5EncoderModel

from helpers.compiling import fast_jit
from helpers.eight_bits import layers_of, rounded, stored
from helpers.naive import load_params
from helpers.reference_models import Transformers, randomise, relative_error
from wanbuild.mapping.encoder_rules import UMT5_RULES
from wanbuild.models import blocks
from wanbuild.models.attention import blocked_attention
from wanbuild.models.eight_bit import store_in_eight_bits
from wanbuild.models.params import abstract_params, bind
from wanbuild.models.tracing import TraceOptions, tracing_with
from wanbuild.models.transformer import WanTransformer
from wanbuild.models.transformer_config import TransformerConfig
from wanbuild.models.umt5 import TextEncoderConfig, UMT5Encoder
from wanrun import EIGHT_BITS

FLOAT32 = 1e-5
BFLOAT16 = 2e-2


def round_activations(model: torch.nn.Module, names: list[str], dtype: str) -> None:
    """Lets linear layers round each token of what they take to 8 bits, by its largest magnitude."""
    largest = EIGHT_BITS[dtype].largest

    def rounded_input(layer: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        scale = given[0].abs().amax(-1, keepdim=True) / largest
        stored = (given[0] / scale).clamp(-largest, largest)
        stored = stored.round() if EIGHT_BITS[dtype].whole else stored.to(getattr(torch, dtype)).float()
        return (stored * scale,)

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(rounded_input)


FORMS = {
    "cpu": TraceOptions(),
    "widened": TraceOptions(widened=True),
    "chip": TraceOptions(cpu=False),
    "w8a8": TraceOptions(w8a8=True),
    "w8a8-chip": TraceOptions(cpu=False, w8a8=True),
}
CASES = [
    (kind, form)
    for kind, one in EIGHT_BITS.items()
    for form in FORMS
    if not (one.block and FORMS[form].w8a8)  # blocks are widened there too
    if kind != "float8_e5m2" or form in ("cpu", "w8a8-chip")  # the others treat it as they do float8
]


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "form"), CASES)
def test_the_transformer(dtype: str, form: str) -> None:
    pair = Transformers("wan", seed=3, attention_head_dim=32, ffn_dim=96, num_layers=3)
    reference, state, module = pair.reference, pair.state, pair.module
    matrices = [key for key, value in state.items() if key.startswith("blocks.") and value.ndim == 2]
    values = {key: torch.from_numpy(value) for key, value in rounded(state, matrices, dtype).items()}
    reference.load_state_dict(values)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 16, 3, 6, 10)).astype(np.float32)
    embeddings = rng.standard_normal((2, 512, 32)).astype(np.float32)

    def referred() -> np.ndarray:
        return pair.theirs(x, 700, embeddings)

    plain = referred()
    if FORMS[form].w8a8:
        round_activations(reference, [key.removesuffix(".weight") for key in matrices], dtype)
    layers = layers_of(module, dtype)
    assert len(layers) == 10 and len(matrices) == 30
    module = store_in_eight_bits(module, layers)
    given = stored(pair.params, layers, FORMS[form].cpu)

    def forward(params: Any, x: Any, embeddings: Any, dtype: Any) -> Any:
        model = bind(module, params)
        kv, rope = model.prepare(embeddings, x.shape[2:], dtype)
        return model(x, jnp.float32(700), kv, rope, {}, blocked_attention, dtype)

    expected = referred()
    with tracing_with(FORMS[form]):
        made = fast_jit(forward, static_argnums=3)(given, x, embeddings, jnp.float32)
        error = relative_error(made, expected)
        if FORMS[form].w8a8:
            # A value in the middle between two of 8 bits may be rounded to the other one, and so may what
            # follows from it: the products themselves are compared in models/test_products.py.
            assert error < relative_error(made, plain) / 3
        else:
            assert error < FLOAT32
        if form == "cpu":
            coarse = fast_jit(forward, static_argnums=3)(given, x, embeddings, jnp.bfloat16)
            assert 1e-4 < relative_error(coarse, expected) < BFLOAT16


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_the_text_encoder(dtype: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 50, "d_model": 64, "d_kv": 8, "d_ff": 96}
    sizes |= {"num_layers": 3, "num_heads": 4}
    reference = UMT5EncoderModel(UMT5Config(**sizes, feed_forward_proj="gated-gelu")).eval()
    state = randomise(reference, seed=2)
    state.pop("encoder.embed_tokens.weight", None)
    matrices = [key for key in state if ".DenseReluDense.wi_" in key]
    values = {key: torch.from_numpy(value) for key, value in rounded(state, matrices, dtype).items()}
    reference.load_state_dict(values, strict=False)
    module = UMT5Encoder(TextEncoderConfig(**sizes), jnp.float32)
    params = load_params(state, UMT5_RULES, module)
    layers = {"blocks/wi_0": dtype, "blocks/wi_1": dtype}
    assert len(matrices) == 6
    module = store_in_eight_bits(module, layers)
    ids = np.random.default_rng(0).integers(1, 50, (2, 17), np.int32)
    mask = np.ones((2, 17), np.int32)
    with torch.no_grad():
        expected = reference(torch.from_numpy(ids).long(), torch.from_numpy(mask)).last_hidden_state.numpy()
    made = fast_jit(lambda params: bind(module, params)(ids, mask, jnp.float32))(stored(params, layers, True))
    assert relative_error(made, expected) < FLOAT32


@pytest.mark.thorough
def test_long_videos_go_through_a_chip_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One video after the other, and tokens of the feed-forward in parts: what all at once give."""
    module = WanTransformer(TransformerConfig(2, 24, 80, 3, 32, freq_dim=64), jnp.float32)
    rng = np.random.default_rng(5)
    params = jax.tree.map(
        lambda leaf: 0.1 * rng.standard_normal(leaf.shape, np.float32), abstract_params(module)
    )
    x = rng.standard_normal((4, 16, 3, 6, 10)).astype(np.float32)
    embeddings = rng.standard_normal((2, 512, 32)).astype(np.float32)

    def forward(params: Any, x: Any, timesteps: Any) -> Any:
        model = bind(module, params)
        kv, rope = model.prepare(embeddings, x.shape[2:], jnp.float32)
        return model(x, timesteps, kv, rope, {}, blocked_attention, jnp.float32)

    tokens = 3 * 3 * 5
    for timesteps in (np.float32(700), rng.uniform(0, 1000, (4, 3)).astype(np.float32)):
        with tracing_with(TraceOptions(cpu=False)):
            whole = fast_jit(forward)(params, x, timesteps)
            loops = str(jax.make_jaxpr(forward)(params, x, timesteps)).count("scan[")
            # 180 tokens in 4 parts, and then 45 of one video in 1; 15 tokens of one video in 3 parts
            for more, limit in ((1, tokens), (2, tokens // 3)):
                monkeypatch.setattr(blocks, "HIDDEN_BYTES", 4 * 80 * limit)
                jax.clear_caches()
                found = str(jax.make_jaxpr(forward)(params, x, timesteps)).count("scan[")
                assert found == loops + more
                assert relative_error(fast_jit(forward)(params, x, timesteps), whole) < 1e-6
                monkeypatch.undo()
