"""The UMT5 text encoder.

Source: transformers' UMT5EncoderModel. It differs from T5 in that every layer has its own relative
position bias. Axes: P prompts, T tokens, N heads, K head dimension, D width, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wanbuild.config import ConfigError, Divisor, Size
from wanbuild.models.layers import Linear, RMSNorm
from wanbuild.models.loops import from_bits, map_leading, to_bits
from wanbuild.models.params import VOCAB, param, scan_layers, stacked
from wanbuild.models.partition import constrain
from wanbuild.models.tracing import for_one_cpu, operand


@dataclass(frozen=True)
class TextEncoderConfig:
    """Config of transformers' UMT5EncoderModel; field names are those of config.json.

    Raises ConfigError if there are too few position buckets, or too short a distance, for logarithmic ones.
    """

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("UMT5EncoderModel",)
    FIXED: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "feed_forward_proj": "gated-gelu",
            "is_gated_act": True,
            "dense_act_fn": "gelu_new",
            "model_type": "umt5",
            "is_decoder": False,
            "scalable_attention": True,
        }
    )
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "add_cross_attention",
            "architectures",
            "bos_token_id",
            "chunk_size_feed_forward",
            "classifier_dropout",
            "decoder_start_token_id",
            "dropout_rate",
            "dtype",
            "eos_token_id",
            "id2label",
            "initializer_factor",
            "is_encoder_decoder",
            "label2id",
            "num_decoder_layers",
            "output_attentions",
            "output_hidden_states",
            "output_past",
            "pad_token_id",
            "problem_type",
            "return_dict",
            "tie_word_embeddings",
            "tokenizer_class",
            "torch_dtype",
            "use_cache",
        }
    )

    vocab_size: Size
    d_model: Size
    d_kv: Size
    d_ff: Size
    num_layers: Size
    num_heads: Size
    relative_attention_num_buckets: Size = 32
    relative_attention_max_distance: Size = 128
    layer_norm_epsilon: Divisor = 1e-6

    def __post_init__(self) -> None:
        exact = self.relative_attention_num_buckets // 4
        if exact == 0:
            raise ConfigError(
                [f"relative_attention_num_buckets is {self.relative_attention_num_buckets}, fewer than 4"]
            )
        if self.relative_attention_max_distance <= exact:
            raise ConfigError(
                [
                    f"relative_attention_max_distance is {self.relative_attention_max_distance}, within the "
                    f"{exact} distances that have buckets of their own"
                ]
            )


def relative_position_buckets(length: int, num_buckets: int, max_distance: int) -> np.ndarray:
    """Returns the bidirectional T5 bucket of every relative position, int32 (2·length - 1,).

    Entry ``length - 1 + d`` is the bucket of distance d = key position - query position. Half of the buckets
    are for keys after the query. In each half, small distances have their own buckets, and larger ones share
    buckets that grow logarithmically up to max_distance. Rounded in float32, like the reference.
    """
    distance = np.arange(-(length - 1), length)
    half = num_buckets // 2
    exact = half // 2
    magnitude = np.abs(distance)
    with np.errstate(divide="ignore"):
        ratio = np.log(magnitude.astype(np.float32) / np.float32(exact)) / np.float32(
            math.log(max_distance / exact)
        )
    logarithmic = exact + np.maximum(ratio * np.float32(half - exact), 0).astype(np.int64)
    bucket = np.where(magnitude < exact, magnitude, np.minimum(logarithmic, half - 1))
    return (bucket + half * (distance > 0)).astype(np.int32)


SCORES_BYTES = 4 * 2**20
"""Limit on the float32 scores that are in work at once on a CPU: several passes read them, from its cache."""


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, buckets: jax.Array, mask: jax.Array
) -> jax.Array:
    """Returns softmax(q kᵀ + bias) v, float32 (P, T, N, K), which UMT5 does not scale by 1/sqrt(K)."""
    # As many heads at once as fit. q, k, v (P, T, N, K); table float32, bias by (bucket, head); buckets int32
    # (T, T), the position bucket of every (query, key); mask bool (P, T), true for tokens.
    P, T, N, K = q.shape
    sizes = [size for size in range(1, N + 1) if N % size == 0 and 4 * P * size * T * T <= SCORES_BYTES]
    size = max(sizes, default=1) if for_one_cpu() else N
    if size == N:
        return _some_heads(q, k, v, table, buckets, mask)
    heads = tuple(jnp.moveaxis(x.reshape(P, T, -1, size, K), 2, 0) for x in (q, k, v))
    tables = jnp.moveaxis(table.reshape(-1, N // size, size), 1, 0)

    def some(qkv_table: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, k, v, table = qkv_table
        return _some_heads(q, k, v, table, buckets, mask)

    return jnp.moveaxis(map_leading(some, (*heads, tables)), 0, 2).reshape(q.shape)


def _some_heads(
    q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, buckets: jax.Array, mask: jax.Array
) -> jax.Array:
    q, k, v = operand(q), operand(k), operand(v)
    scores = jnp.einsum("PSNK,PTNK->PNST", q, k, preferred_element_type=jnp.float32)
    scores = scores + table[buckets].transpose(2, 0, 1)
    scores = jnp.where(mask[:, None, None, :], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("PNST,PTNK->PSNK", weights, v, preferred_element_type=jnp.float32)


class UMT5Block(nnx.Module):
    """Self-attention with a relative position bias, then a gated feed-forward; both pre-norm."""

    def __init__(self, config: TextEncoderConfig, dtype: Any, norm_dtype: Any) -> None:
        inner = config.num_heads * config.d_kv
        self.attn_norm = RMSNorm(config.d_model, norm_dtype, config.layer_norm_epsilon)
        self.q = Linear(config.d_model, inner, dtype, ("heads", "embed"), bias=False)
        self.k = Linear(config.d_model, inner, dtype, ("heads", "embed"), bias=False)
        self.v = Linear(config.d_model, inner, dtype, ("heads", "embed"), bias=False)
        self.o = Linear(inner, config.d_model, dtype, ("embed", "heads"), bias=False)
        self.relative_attention_bias = param(
            (config.relative_attention_num_buckets, config.num_heads), norm_dtype, (None, "heads")
        )
        self.ff_norm = RMSNorm(config.d_model, norm_dtype, config.layer_norm_epsilon)
        self.wi_0 = Linear(config.d_model, config.d_ff, dtype, ("mlp", "embed"), bias=False)
        self.wi_1 = Linear(config.d_model, config.d_ff, dtype, ("mlp", "embed"), bias=False)
        self.wo = Linear(config.d_ff, config.d_model, dtype, ("embed", "mlp"), bias=False)
        self.heads = config.num_heads

    def __call__(self, x: jax.Array, buckets: jax.Array, mask: jax.Array) -> jax.Array:
        """Applies one layer to tokens (P, T, D) in the compute dtype.

        ``buckets`` is int32 (T, T), the position bucket of every (query, key); ``mask`` is bool (P, T), true
        for tokens.
        """
        P, T, _ = x.shape
        y = self.attn_norm(x)
        q, k, v = (proj(y).reshape(P, T, self.heads, -1) for proj in (self.q, self.k, self.v))
        table = self.relative_attention_bias[...].astype(jnp.float32)
        out = _attention(q, k, v, table, buckets, mask).astype(x.dtype)
        out = self.o(out.reshape(P, T, -1), out_dtype=jnp.float32)
        x = (x.astype(jnp.float32) + out).astype(x.dtype)

        y = self.ff_norm(x)
        gate = jax.nn.gelu(self.wi_0(y, out_dtype=jnp.float32), approximate=True)
        hidden = (gate * self.wi_1(y, out_dtype=jnp.float32)).astype(x.dtype)
        x = (x.astype(jnp.float32) + self.wo(hidden, out_dtype=jnp.float32)).astype(x.dtype)
        return constrain(x)


class UMT5Encoder(nnx.Module):
    """The encoder stack.

    ``dtype`` is the storage dtype of the embedding and the matmul weights, ``norm_dtype`` that of norms and
    position biases.
    """

    def __init__(
        self, config: TextEncoderConfig, dtype: Any = jnp.bfloat16, norm_dtype: Any = jnp.float32
    ) -> None:
        self.config = config
        self.shared = param((config.vocab_size, config.d_model), dtype, (VOCAB, "embed"))
        self.blocks = stacked(UMT5Block(config, dtype, norm_dtype), config.num_layers)
        self.final_norm = RMSNorm(config.d_model, norm_dtype, config.layer_norm_epsilon)

    def __call__(self, ids: jax.Array, mask: jax.Array, dtype: Any) -> jax.Array:
        """Returns the embeddings of prompts, (P, T, D), zero past each prompt's length, computed in dtype.

        ``ids`` are padded token ids, int32 (P, T); ``mask`` is int32 (P, T), 1 for tokens.
        """
        T = ids.shape[1]
        table = relative_position_buckets(
            T, self.config.relative_attention_num_buckets, self.config.relative_attention_max_distance
        )
        positions = jax.lax.iota(jnp.int32, T)
        buckets = jnp.asarray(table)[positions[None, :] - positions[:, None] + (T - 1)]
        keep = mask > 0
        x = constrain(from_bits(to_bits(self.shared[...])[ids])).astype(dtype)
        x = scan_layers(self.blocks, lambda block, x, _: block(x, buckets, keep), x)
        return jnp.where(keep[..., None], self.final_norm(x), 0).astype(dtype)
