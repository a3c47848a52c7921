"""Embeds the conditions of a denoising step: timesteps, text and image tokens."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wanbuild.models.layers import LayerNorm, Linear
from wanbuild.models.params import param
from wanbuild.models.partition import constrain
from wanbuild.models.transformer_config import TransformerConfig


def timestep_basis(freq_dim: int) -> np.ndarray:
    """Returns the timestep embedding's frequencies, float32 (freq_dim // 2,), rounded like the reference."""
    half = freq_dim // 2
    exponent = np.float32(-math.log(10_000)) * np.arange(half, dtype=np.float32) / np.float32(half)
    # Rounded once from float64: NumPy's float32 exp differs from the reference's in 55 of 128 entries, this
    # in 2, and an ulp of frequency is 6e-5 rad at timestep 999.
    return np.exp(exponent.astype(np.float64)).astype(np.float32)


def timestep_embedding(timesteps: jax.Array, freq_dim: int) -> jax.Array:
    """Returns the sinusoidal embedding of float32 timesteps: (...,) -> (..., freq_dim), cosines first."""
    angles = timesteps[..., None] * timestep_basis(freq_dim)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


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


class ImageEmbedder(nnx.Module):
    """Projects image tokens to the transformer's width: norm, linear, exact GELU, linear, norm."""

    EPS = 1e-5  # torch.nn.LayerNorm's default; the config's value is not used here

    def __init__(self, image_dim: int, dim: int, positions: int | None, dtype: Any) -> None:
        self.norm1 = LayerNorm(image_dim, dtype, self.EPS)
        self.up = Linear(image_dim, image_dim, dtype, ("mlp", "embed"))
        self.down = Linear(image_dim, dim, dtype, ("embed", "mlp"))
        self.norm2 = LayerNorm(dim, dtype, self.EPS)
        self.positions = positions
        if positions is not None:
            self.pos_embed = param((1, positions, image_dim), dtype, (None, None, None))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """float32 (1, I, image_dim) -> float32 (1, I, D); with positions, I must be their number."""
        if self.positions is not None:
            tokens = tokens + self.pos_embed[...].astype(jnp.float32)
        hidden = jax.nn.gelu(self.up(self.norm1(tokens)), approximate=False)
        return self.norm2(self.down(hidden))


class ConditionEmbedder(nnx.Module):
    """Embeds timesteps, text and image tokens, in float32."""

    def __init__(self, config: TransformerConfig, dtype: Any) -> None:
        self.time_embedder = MLP(config.freq_dim, config.dim, config.dim, dtype, "silu")
        self.time_proj = Linear(config.dim, 6 * config.dim, dtype, ("mlp", "embed"))
        self.text_embedder = MLP(config.text_dim, config.dim, config.dim, dtype, "gelu")
        if config.image_dim is not None:
            self.image_embedder = ImageEmbedder(config.image_dim, config.dim, config.pos_embed_seq_len, dtype)
        self.freq_dim = config.freq_dim

    def time(self, timesteps: jax.Array) -> tuple[jax.Array, jax.Array]:
        """float32 timesteps (...,) -> the embedding (..., D) and its six modulations (..., 6, D)."""
        embedding = self.embedded(self.time_embedder, timesteps)
        return embedding, self.modulation(embedding)

    def embedded(self, embedder: MLP, timesteps: jax.Array) -> jax.Array:
        """float32 timesteps (...,) -> their embedding (..., D)."""
        return constrain(embedder(timestep_embedding(timesteps, self.freq_dim)))

    def modulation(self, embedding: jax.Array) -> jax.Array:
        """An embedding (..., D) -> the six modulations (..., 6, D)."""
        modulation = constrain(self.time_proj(jax.nn.silu(embedding)))
        return modulation.reshape(*modulation.shape[:-1], 6, -1)

    def text(self, embeddings: jax.Array) -> jax.Array:
        """Prompt embeddings (P, T, text_dim) -> (P, T, D) float32."""
        return self.text_embedder(embeddings.astype(jnp.float32))

    def image(self, tokens: jax.Array) -> jax.Array:
        """Image tokens (N, I, image_dim) of N images -> (1, N I, D) float32, the images in order."""
        return self.image_embedder(tokens.astype(jnp.float32).reshape(1, -1, tokens.shape[-1]))
