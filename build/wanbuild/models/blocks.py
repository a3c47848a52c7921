"""The transformer's block: self-attention, cross-attention to cached keys and values, feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from wanbuild.models.layers import LayerNorm, Linear, RMSNorm, layer_norm
from wanbuild.models.nag import guided_away
from wanbuild.models.params import param
from wanbuild.models.partition import ROTARY, constrain, mesh_sizes
from wanbuild.models.passes import Unrotated
from wanbuild.models.prompt_rows import PromptRows
from wanbuild.models.sequence import TokenAttention
from wanbuild.models.tracing import trace_options
from wanbuild.models.transformer_config import TransformerConfig

KV = Mapping[str, jax.Array]
"""KV cache of cross-attention for a stack of L blocks, in the compute dtype: ``k`` and ``v`` (L, P, T, N, K)
for text; ``image_k`` and ``image_v`` (L, 1, I, N, K) for image tokens and, if those are padded,
``image_mask``, bool (L, I), true for real tokens. A block that is guided away from the negative prompt has
``negative_k`` and ``negative_v`` (1, T, N, K) of it too, and ``nag``, the settings of ``guided_away``."""

OF_PROMPTS = ("k", "v")
"""Names in ``KV`` of arrays that differ by prompt."""

STORED: Mapping[str, tuple[str | None, ...]] = MappingProxyType(
    dict.fromkeys(("k", "v", "image_k", "image_v"), ("prompts", None, "stored_heads", None))
)
"""Names of the axes of one layer of ``KV``, as it is kept on a mesh; a mask is whole on every device."""

HIDDEN_BYTES = 2**30
"""Limit on the values between the matmuls of a feed-forward that a chip holds at once. Those of all tokens of
a 14B model at 720p are 2.1 GB, and half of them fills matrix units as well."""

Rope = Mapping[str, jax.Array]
"""``cos`` and ``sin`` of shape (S, K // 2) in float32."""


def modulated(
    x: jax.Array, scale: jax.Array, shift: jax.Array, eps: float, groups: jax.Array | None = None
) -> jax.Array:
    """Applies layer norm without parameters, then x (1 + scale) + shift; returns float32 (B, S, D).

    ``scale`` and ``shift`` are float32 (1 or B, G, D); each of the G rows applies to S / G consecutive
    tokens, or to those of its number in ``groups``, int32 (S,).
    """
    y = layer_norm(x, eps)
    if groups is not None:
        return y * (1 + _of_tokens(scale, groups)) + _of_tokens(shift, groups)
    return (_in_groups(y, scale) * (1 + scale[:, :, None]) + shift[:, :, None]).reshape(x.shape)


def gated(x: jax.Array, gate: jax.Array, groups: jax.Array | None = None) -> jax.Array:
    """Multiplies x (B, S, D) by a gate (1 or B, G, D); rows apply to tokens as in ``modulated``."""
    if groups is not None:
        return x * _of_tokens(gate, groups)
    return (_in_groups(x, gate) * gate[:, :, None]).reshape(x.shape)


def _in_groups(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Reshapes (B, S, D) to (B, G, S / G, D) for rows (..., G, D)."""
    return x.reshape(len(x), rows.shape[1], -1, x.shape[-1])


def _of_tokens(rows: jax.Array, groups: jax.Array) -> jax.Array:
    """Returns the row of each token, (1 or B, S, D), of rows (1 or B, G, D)."""
    if rows.shape[1] == 2:  # a choice is a part of what reads it, and a gather is not on every chip
        return jnp.where(groups[:, None] == 0, rows[:, :1], rows[:, 1:])
    return rows[:, groups]


def kept_dtype(x: jax.Array) -> Any:
    """Returns the dtype of products of x that are not final: float32, or x's where products are rounded."""
    return x.dtype if trace_options().rounded else jnp.float32


class WanAttention(nnx.Module):
    """Projections and norms of one attention; queries and keys are normalised over the full width."""

    def __init__(self, config: TransformerConfig, dtype: Any, norm_dtype: Any, heads: str = "heads") -> None:
        dim = config.dim
        self.to_q = Linear(dim, dim, dtype, (heads, "embed"))
        self.to_k = Linear(dim, dim, dtype, (heads, "embed"))
        self.to_v = Linear(dim, dim, dtype, ("heads", "embed"))
        self.to_out = Linear(dim, dim, dtype, ("embed", "heads"))
        self.norm_q = RMSNorm(dim, norm_dtype, config.eps, heads)
        self.norm_k = RMSNorm(dim, norm_dtype, config.eps, heads)
        self.heads = config.num_attention_heads

    def split_heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], self.heads, -1)

    def query(self, x: jax.Array) -> jax.Array:
        """(B, S, D) -> normalised float32 (B, S, N, K)."""
        return self.split_heads(self.norm_q(self.to_q(x, out_dtype=jnp.float32)))

    def key(self, x: jax.Array) -> jax.Array:
        """(B, S, D) -> normalised float32 (B, S, N, K)."""
        return self.split_heads(self.norm_k(self.to_k(x, out_dtype=jnp.float32)))

    def value(self, x: jax.Array) -> jax.Array:
        """(B, S, D) -> (B, S, N, K) in x's dtype."""
        return self.split_heads(self.to_v(x))

    def unrotated(self, x: jax.Array) -> tuple[Unrotated, Unrotated, jax.Array]:
        """(B, S, D) -> queries and keys that are to be normalised and rotated, and values (B, S, N, K)."""
        kept = kept_dtype(x)
        q, k = self.to_q(x, out_dtype=kept), self.to_k(x, out_dtype=kept)
        queries = Unrotated(q, self.norm_q.inverse(q), self.norm_q.weight[...])
        return queries, Unrotated(k, self.norm_k.inverse(k), self.norm_k.weight[...]), self.value(x)

    def project(self, heads: jax.Array) -> jax.Array:
        """(B, S, N, K) -> float32 (B, S, D)."""
        return self.to_out(heads.reshape(*heads.shape[:-2], -1), out_dtype=jnp.float32)


class CrossAttention(WanAttention):
    """Attention to text, and to image tokens if the model has keys and values for them."""

    def __init__(self, config: TransformerConfig, dtype: Any, norm_dtype: Any) -> None:
        super().__init__(config, dtype, norm_dtype)
        self.has_image = config.added_kv_proj_dim is not None
        if config.added_kv_proj_dim is not None:
            dim, added = config.dim, config.added_kv_proj_dim
            self.add_k_proj = Linear(added, dim, dtype, ("heads", "embed"))
            self.add_v_proj = Linear(added, dim, dtype, ("heads", "embed"))
            self.norm_added_k = RMSNorm(dim, norm_dtype, config.eps, "heads")

    def kv(self, text: PromptRows, image: jax.Array | None, mask: jax.Array | None) -> dict[str, jax.Array]:
        """Returns the keys and values of one block, one layer of ``KV``, in text's dtype.

        Text is embedded, (P, T, D). ``image`` is embedded image tokens (1, I, D), if the model has keys and
        values for them; ``mask`` is bool (I,), true for real image tokens, None if all are real.
        """
        dtype = text.rows.dtype
        kv = text.map(lambda rows: {"k": self.key(rows).astype(dtype), "v": self.value(rows)})
        if image is not None:
            key = self.norm_added_k(self.add_k_proj(image, out_dtype=jnp.float32))
            kv["image_k"] = self.split_heads(key.astype(dtype))
            kv["image_v"] = self.split_heads(self.add_v_proj(image))
        kv = {name: constrain(x, *STORED[name]) for name, x in kv.items()}
        if mask is not None:
            kv["image_mask"] = mask
        return kv

    def __call__(self, x: jax.Array, kv: KV, attention: TokenAttention) -> jax.Array:
        """Attends from (B, S, D) to one layer of ``KV``; returns float32 (B, S, D)."""
        q = attention.scaled(self.query(x), x.dtype)
        out = attention.to(q, kv["k"], kv["v"])
        if "nag" in kv:
            negative = kv["negative_k"], kv["negative_v"]
            out = guided_away(out, lambda: attention.to(q, *negative), kv["nag"])
        if self.has_image:
            # The normalised query is the same as for text; both results are added before the projection.
            out = out + attention.to(q, kv["image_k"], kv["image_v"], kv.get("image_mask"))
        return self.project(out)


class FeedForward(nnx.Module):
    """Two matmuls around a tanh-approximated GELU."""

    def __init__(self, config: TransformerConfig, dtype: Any) -> None:
        self.up = Linear(config.dim, config.ffn_dim, dtype, ("mlp", "embed"))
        self.down = Linear(config.ffn_dim, config.dim, dtype, ("embed", "mlp"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, S, D) -> float32 (B, S, D)."""
        parts = self.parts(x)
        if parts == 1:
            return self._some(x)
        return jax.lax.map(self._some, x.reshape(parts, 1, -1, x.shape[-1])).reshape(x.shape)

    def parts(self, x: jax.Array) -> int:
        """Returns in how many equal parts a chip computes tokens (B, S, D) one after the other."""
        tokens = x.size // x.shape[-1]
        wanted = -(-x.dtype.itemsize * tokens * self.up.weight.shape[-2] // HIDDEN_BYTES)
        if wanted == 1 or trace_options().cpu or mesh_sizes():
            return 1
        return next((parts for parts in range(wanted, 4 * wanted) if tokens % parts == 0), 1)

    def _some(self, x: jax.Array) -> jax.Array:
        hidden = constrain(self.up(x, out_dtype=kept_dtype(x)), "videos", "tokens", "mlp")
        hidden = jax.nn.gelu(hidden, approximate=True).astype(x.dtype)
        if not trace_options().cpu:
            # Else the second product reads float32, and takes the activation of every block several times.
            hidden = jax.lax.optimization_barrier(hidden)
        return self.down(hidden, out_dtype=jnp.float32)


class WanBlock(nnx.Module):
    """Self-attention, cross-attention to the cached keys and values, feed-forward."""

    def __init__(self, config: TransformerConfig, dtype: Any, norm_dtype: Any) -> None:
        self.attn1 = WanAttention(config, dtype, norm_dtype, ROTARY)
        self.attn2 = CrossAttention(config, dtype, norm_dtype)
        self.norm2 = LayerNorm(config.dim, norm_dtype, config.eps)
        self.ffn = FeedForward(config, dtype)
        self.scale_shift_table = param((1, 6, config.dim), norm_dtype, (None, None, "embed"))
        self.eps = config.eps

    def __call__(
        self,
        x: jax.Array,
        kv: KV,
        modulation: jax.Array,
        rope: Rope,
        attention: TokenAttention,
        groups: jax.Array | None = None,
    ) -> jax.Array:
        """Applies one block to tokens (B, S, D), whose shape and dtype the result has.

        Args:
            kv: one layer of the cache, B a multiple of P; consecutive videos share a prompt.
            modulation: float32 (1 or B, G, 6, D); each of the G rows applies to S / G consecutive tokens.
            groups: the row of each token, int32 (S,), where rows do not apply to equal parts of the tokens.
        """
        table = self.table(modulation)
        heads = attention.among(*self.unrotated(x, table, groups), rope["cos"], rope["sin"])
        return self.after(x, heads, kv, table, attention, groups)

    def table(self, modulation: jax.Array) -> jax.Array:
        """Returns the block's own shifts, scales and gates, float32 (1 or B, G, 6, D)."""
        return self.scale_shift_table[...].astype(jnp.float32) + modulation

    def unrotated(
        self, x: jax.Array, table: jax.Array, groups: jax.Array | None = None
    ) -> tuple[Unrotated, Unrotated, jax.Array]:
        """Returns queries, keys and values of the self-attention of tokens (B, S, D)."""
        y = modulated(x, table[..., 1, :], table[..., 0, :], self.eps, groups).astype(x.dtype)
        return self.attn1.unrotated(y)

    def after(
        self,
        x: jax.Array,
        heads: jax.Array,
        kv: KV,
        table: jax.Array,
        attention: TokenAttention,
        groups: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the block's tokens, from those before it and the self-attention's heads (B, S, N, K)."""
        gate_1, shift_2, scale_2, gate_2 = (table[..., i, :] for i in range(2, 6))
        out = self.attn1.project(heads)
        x = (x.astype(jnp.float32) + gated(out, gate_1, groups)).astype(x.dtype)

        x = self.prompted(x, kv, attention)

        y = modulated(x, scale_2, shift_2, self.eps, groups).astype(x.dtype)
        x = (x.astype(jnp.float32) + gated(self.ffn(y), gate_2, groups)).astype(x.dtype)
        return constrain(x, "videos", "tokens", None)

    def prompted(self, x: jax.Array, kv: KV, attention: TokenAttention) -> jax.Array:
        """Adds to tokens (B, S, D) what they take from the prompt."""
        y = self.norm2(x).astype(x.dtype)
        return (x.astype(jnp.float32) + self.attn2(y, kv, attention)).astype(x.dtype)
