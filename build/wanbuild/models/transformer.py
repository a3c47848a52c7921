"""The Wan diffusion transformer: patch embedding, condition embedder, one scanned block, output head.

Source: diffusers' WanTransformer3DModel. Axes: B batch, S tokens, N heads, K head dimension, D width,
L layers, P prompts, T text tokens. Matmuls run in the compute dtype with float32 accumulation; norms,
modulation and the condition embedder run in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wanbuild.models.attention import Attention
from wanbuild.models.layers import LayerNorm, Linear, RMSNorm, layer_norm
from wanbuild.models.loops import map_leading
from wanbuild.models.params import param, scan_layers, stacked
from wanbuild.models.rope import apply_rope, rope_tables
from wanbuild.models.transformer_config import TransformerConfig

KV = Mapping[str, jax.Array]
"""Cross-attention cache: ``k`` and ``v`` of shape (L, P, T, N, K) in the compute dtype."""

Rope = Mapping[str, jax.Array]
"""``cos`` and ``sin`` of shape (S, K // 2) in float32."""


def timestep_basis(freq_dim: int) -> np.ndarray:
    """Frequencies of the sinusoidal timestep embedding, float32 (freq_dim // 2,), as the reference rounds."""
    half = freq_dim // 2
    exponent = np.float32(-math.log(10_000)) * np.arange(half, dtype=np.float32) / np.float32(half)
    # Rounded once from float64: NumPy's float32 exp differs from the reference's in 55 of 128 entries,
    # this in 2, and an ulp of frequency is 6e-5 rad at timestep 999.
    return np.exp(exponent.astype(np.float64)).astype(np.float32)


def timestep_embedding(timesteps: jax.Array, freq_dim: int) -> jax.Array:
    """Sinusoidal embedding of float32 timesteps of any shape: (...,) -> (..., freq_dim), cosines first."""
    angles = timesteps[..., None] * timestep_basis(freq_dim)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def modulated(x: jax.Array, scale: jax.Array, shift: jax.Array, eps: float) -> jax.Array:
    """Layer norm without parameters, then x (1 + scale) + shift, in float32.

    Args:
        x: tokens (B, S, D).
        scale: float32 (1 or B, G, D); each of the G rows is for S / G consecutive tokens.
        shift: as scale.
        eps: of the norm.

    Returns:
        float32 (B, S, D).
    """
    y = _in_groups(layer_norm(x, eps), scale)
    return (y * (1 + scale[:, :, None]) + shift[:, :, None]).reshape(x.shape)


def gated(x: jax.Array, gate: jax.Array) -> jax.Array:
    """x (B, S, D) times a gate (1 or B, G, D), each row of which is for S / G consecutive tokens."""
    return (_in_groups(x, gate) * gate[:, :, None]).reshape(x.shape)


def _in_groups(x: jax.Array, rows: jax.Array) -> jax.Array:
    """(B, S, D) as (B, G, S / G, D) for rows (..., G, D)."""
    return x.reshape(len(x), rows.shape[1], -1, x.shape[-1])


def spatial_shape(latents: jax.Array) -> tuple[int, int, int]:
    """Frames, rows and columns of latents (B, C, T, h, w)."""
    _, _, T, h, w = latents.shape
    return T, h, w


class MLP(nnx.Module):
    """linear_1, an activation, linear_2."""

    def __init__(self, in_dim: int, hidden: int, out_dim: int, dtype: Any, activation: str) -> None:
        self.linear_1 = Linear(in_dim, hidden, dtype, ("mlp", "embed"))
        self.linear_2 = Linear(hidden, out_dim, dtype, ("embed", "mlp"))
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.linear_1(x, out_dtype=jnp.float32)
        hidden = jax.nn.silu(hidden) if self.activation == "silu" else jax.nn.gelu(hidden, approximate=True)
        return self.linear_2(hidden.astype(x.dtype))


class ConditionEmbedder(nnx.Module):
    """Embeds timesteps and text, in float32."""

    def __init__(self, config: TransformerConfig, dtype: Any) -> None:
        self.time_embedder = MLP(config.freq_dim, config.dim, config.dim, dtype, "silu")
        self.time_proj = Linear(config.dim, 6 * config.dim, dtype, ("mlp", "embed"))
        self.text_embedder = MLP(config.text_dim, config.dim, config.dim, dtype, "gelu")
        self.freq_dim = config.freq_dim

    def time(self, timesteps: jax.Array) -> tuple[jax.Array, jax.Array]:
        """float32 timesteps (...,) -> the embedding (..., D) and its six modulations (..., 6, D)."""
        embedding = self.time_embedder(timestep_embedding(timesteps, self.freq_dim))
        modulation = self.time_proj(jax.nn.silu(embedding))
        return embedding, modulation.reshape(*modulation.shape[:-1], 6, -1)

    def text(self, embeddings: jax.Array) -> jax.Array:
        """Prompt embeddings (P, T, text_dim) -> (P, T, D) float32."""
        return self.text_embedder(embeddings.astype(jnp.float32))


class WanAttention(nnx.Module):
    """Projections and norms of one attention; queries and keys are normalised over the full width."""

    def __init__(self, config: TransformerConfig, dtype: Any, norm_dtype: Any) -> None:
        dim = config.dim
        self.to_q = Linear(dim, dim, dtype, ("heads", "embed"))
        self.to_k = Linear(dim, dim, dtype, ("heads", "embed"))
        self.to_v = Linear(dim, dim, dtype, ("heads", "embed"))
        self.to_out = Linear(dim, dim, dtype, ("embed", "heads"))
        self.norm_q = RMSNorm(dim, norm_dtype, config.eps, "heads")
        self.norm_k = RMSNorm(dim, norm_dtype, config.eps, "heads")
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

    def project(self, heads: jax.Array) -> jax.Array:
        """(B, S, N, K) -> float32 (B, S, D)."""
        return self.to_out(heads.reshape(*heads.shape[:-2], -1), out_dtype=jnp.float32)


class FeedForward(nnx.Module):
    """Two matmuls around a tanh-approximated GELU."""

    def __init__(self, config: TransformerConfig, dtype: Any) -> None:
        self.up = Linear(config.dim, config.ffn_dim, dtype, ("mlp", "embed"))
        self.down = Linear(config.ffn_dim, config.dim, dtype, ("embed", "mlp"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, S, D) -> float32 (B, S, D)."""
        hidden = jax.nn.gelu(self.up(x, out_dtype=jnp.float32), approximate=True)
        return self.down(hidden.astype(x.dtype), out_dtype=jnp.float32)


class WanBlock(nnx.Module):
    """Self-attention, cross-attention to the cached text keys and values, feed-forward."""

    def __init__(self, config: TransformerConfig, dtype: Any, norm_dtype: Any) -> None:
        self.attn1 = WanAttention(config, dtype, norm_dtype)
        self.attn2 = WanAttention(config, dtype, norm_dtype)
        self.norm2 = LayerNorm(config.dim, norm_dtype, config.eps)
        self.ffn = FeedForward(config, dtype)
        self.scale_shift_table = param((1, 6, config.dim), norm_dtype, (None, None, "embed"))
        self.eps = config.eps

    def text_kv(self, text: jax.Array) -> dict[str, jax.Array]:
        """Keys and values of the embedded text (P, T, D), each (P, T, N, K) in text's dtype."""
        return {"k": self.attn2.key(text).astype(text.dtype), "v": self.attn2.value(text)}

    def __call__(
        self, x: jax.Array, kv: KV, modulation: jax.Array, rope: Rope, attention: Attention
    ) -> jax.Array:
        """One block.

        Args:
            x: tokens of shape (B, S, D) in the compute dtype.
            kv: ``k`` and ``v`` of shape (P, T, N, K), B a multiple of P; consecutive videos share a prompt.
            modulation: float32 (1 or B, G, 6, D); each of the G rows is for S / G consecutive tokens.
            rope: the rotary tables.
            attention: the attention implementation.

        Returns:
            Tokens of x's shape and dtype.
        """
        table = self.scale_shift_table[...].astype(jnp.float32) + modulation
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (table[..., i, :] for i in range(6))

        y = modulated(x, scale_1, shift_1, self.eps).astype(x.dtype)
        q = apply_rope(self.attn1.query(y), rope["cos"], rope["sin"]).astype(x.dtype)
        k = apply_rope(self.attn1.key(y), rope["cos"], rope["sin"]).astype(x.dtype)
        out = self.attn1.project(attention(q, k, self.attn1.value(y)))
        x = (x.astype(jnp.float32) + gated(out, gate_1)).astype(x.dtype)

        y = self.norm2(x).astype(x.dtype)
        q = self.attn2.query(y).astype(x.dtype)
        B, S, N, K = q.shape
        P = kv["k"].shape[0]
        # Videos of one prompt attend to the same keys: they become more queries, not copies of the keys.
        out = attention(q.reshape(P, B // P * S, N, K), kv["k"], kv["v"]).reshape(B, S, N, K)
        x = (x.astype(jnp.float32) + self.attn2.project(out)).astype(x.dtype)

        y = modulated(x, scale_2, shift_2, self.eps).astype(x.dtype)
        return (x.astype(jnp.float32) + gated(self.ffn(y), gate_2)).astype(x.dtype)


class WanTransformer(nnx.Module):
    """The denoiser.

    Args:
        config: the checkpoint's config.
        dtype: storage dtype of the matmul weights.
        norm_dtype: storage dtype of norms, the condition embedder and scale_shift_table.
    """

    def __init__(
        self, config: TransformerConfig, dtype: Any = jnp.bfloat16, norm_dtype: Any = jnp.float32
    ) -> None:
        self.config = config
        patch_in = config.in_channels * config.patch_volume
        patch_out = config.out_channels * config.patch_volume
        self.patch_embedding = Linear(patch_in, config.dim, dtype, ("embed", None))
        self.condition_embedder = ConditionEmbedder(config, norm_dtype)
        self.blocks = stacked(WanBlock(config, dtype, norm_dtype), config.num_layers)
        self.scale_shift_table = param((1, 2, config.dim), norm_dtype, (None, None, "embed"))
        self.proj_out = Linear(config.dim, patch_out, dtype, (None, "embed"))

    def prepare(
        self, embeddings: jax.Array, latent_shape: tuple[int, int, int], dtype: Any
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """What stays the same over a generation: the cross-attention cache and the rotary tables.

        Args:
            embeddings: prompt embeddings (P, T, text_dim).
            latent_shape: latent frames, rows and columns.
            dtype: compute dtype of the cache.

        Returns:
            The KV cache and the rope tables.
        """
        text = self.condition_embedder.text(embeddings).astype(dtype)
        graphdef, state = nnx.split(self.blocks)
        kv = map_leading(lambda layer: nnx.merge(graphdef, layer).text_kv(text), state)
        cos, sin = rope_tables(self.config.grid(latent_shape), self.config.attention_head_dim)
        return kv, {"cos": cos, "sin": sin}

    def patchify(self, latents: jax.Array) -> jax.Array:
        """(B, C, T, h, w) -> tokens of raw values (B, S, C·patch volume), in the order of the conv weight."""
        B, C = latents.shape[:2]
        grid = self.config.grid(spatial_shape(latents))
        pt, ph, pw = self.config.patch_size
        t, h, w = grid
        x = latents.reshape(B, C, t, pt, h, ph, w, pw).transpose(0, 2, 4, 6, 1, 3, 5, 7)
        return x.reshape(B, t * h * w, C * pt * ph * pw)

    def unpatchify(self, tokens: jax.Array, latent_shape: tuple[int, int, int]) -> jax.Array:
        """(B, S, patch volume·C) -> (B, C, T, h, w)."""
        t, h, w = self.config.grid(latent_shape)
        pt, ph, pw = self.config.patch_size
        x = tokens.reshape(-1, t, h, w, pt, ph, pw, self.config.out_channels)
        return x.transpose(0, 7, 1, 4, 2, 5, 3, 6).reshape(len(tokens), -1, *latent_shape)

    def __call__(
        self,
        latents: jax.Array,
        timesteps: jax.Array,
        kv: KV,
        rope: Rope,
        attention: Attention,
        dtype: Any,
    ) -> jax.Array:
        """Predicts the flow velocity.

        Args:
            latents: float32 (B, C, T, h, w).
            timesteps: float32 () or (B,), or (1 or B, G) where each of the G is for S / G consecutive tokens:
                G is S for one per token, and T for one per latent frame.
            kv: cross-attention cache for P prompts, B a multiple of P.
            rope: rotary tables.
            attention: the attention implementation.
            dtype: compute dtype.

        Returns:
            float32 (B, out_channels, T, h, w).
        """
        timesteps = timesteps if timesteps.ndim == 2 else jnp.atleast_1d(timesteps)[:, None]
        embedding, modulation = self.condition_embedder.time(timesteps)
        x = self.patch_embedding(self.patchify(latents).astype(dtype))

        def apply(block: WanBlock, x: jax.Array, kv: KV) -> jax.Array:
            return block(x, kv, modulation, rope, attention)

        x = scan_layers(self.blocks, apply, x, kv)
        head = self.scale_shift_table[...].astype(jnp.float32) + embedding[..., None, :]
        x = modulated(x, head[..., 1, :], head[..., 0, :], self.config.eps).astype(dtype)
        return self.unpatchify(self.proj_out(x, out_dtype=jnp.float32), spatial_shape(latents))
