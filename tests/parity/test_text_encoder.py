"""The text encoder against transformers' UMT5EncoderModel, every parameter random."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import UMT5Config, UMT5EncoderModel

from helpers.fast_compile import fast_jit
from helpers.naive import load_params
from helpers.reference_models import randomise, relative_error
from wanbuild.mapping.encoder_rules import UMT5_RULES
from wanbuild.models.params import bind
from wanbuild.models.umt5 import TextEncoderConfig, UMT5Encoder, relative_position_buckets


@pytest.mark.thorough
@pytest.mark.parametrize(("buckets", "max_distance"), [(8, 128), (32, 128), (16, 40)])
def test_against_reference(buckets: int, max_distance: int) -> None:
    config = UMT5Config(
        vocab_size=300,
        d_model=32,
        d_kv=8,
        d_ff=37,
        num_layers=3,
        num_heads=4,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    reference = UMT5EncoderModel(config).eval()
    state = randomise(reference, seed=buckets)
    state = {key: value for key, value in state.items() if key != "encoder.embed_tokens.weight"}
    module = UMT5Encoder(TextEncoderConfig(300, 32, 8, 37, 3, 4, buckets, max_distance), jnp.float32)
    params = load_params(state, UMT5_RULES, module)

    rng = np.random.default_rng(0)
    ids = rng.integers(2, 300, (3, 512)).astype(np.int32)
    mask = (np.arange(512) < np.array([[1], [37], [512]])).astype(np.int32)
    with torch.no_grad():
        hidden = reference(torch.from_numpy(ids).long(), torch.from_numpy(mask)).last_hidden_state.numpy()

    run = fast_jit(lambda p, i, m: bind(module, p)(i, m, jnp.float32))
    embeddings = np.asarray(run(params, ids, mask))
    # Seen: 2e-6, of which the reference's own distance from float64 is 1.6e-6.
    assert relative_error(embeddings, hidden * mask[..., None]) < 1e-5
    assert not embeddings[mask == 0].any()

    one_by_one = np.concatenate([np.asarray(run(params, ids[i : i + 1], mask[i : i + 1])) for i in range(3)])
    assert relative_error(one_by_one, embeddings) < 2e-6

    half = fast_jit(lambda p, i, m: bind(module, p)(i, m, jnp.bfloat16))(params, ids, mask)
    assert 1e-4 < relative_error(half, hidden * mask[..., None]) < 5e-2  # three layers of bf16 roundings


def test_buckets_by_hand() -> None:
    """Eight buckets: distances 0, 1, then logarithmic ones, the keys after the query in the upper half."""
    table = relative_position_buckets(6, num_buckets=8, max_distance=16)
    #                        -5 -4 -3 -2 -1  0  1  2  3  4  5
    assert table.tolist() == [2, 2, 2, 2, 1, 0, 5, 6, 6, 6, 6]
