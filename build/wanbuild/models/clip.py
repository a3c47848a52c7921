"""The CLIP image encoder, up to the input of the last layer, which is all that Wan uses.

Source: transformers' CLIPVisionModel; diffusers' pipelines use its ``hidden_states[-2]``. Axes: N images,
T tokens (the class token first, then patches row by row), H heads, K head dimension, D width, C channels,
S pixels per side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from wanbuild.models.clip_config import ImageEncoderConfig
from wanbuild.models.layers import LayerNorm, Linear
from wanbuild.models.params import Stack, param, stacked
from wanbuild.models.partition import constrain


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def _quick_gelu(x: jax.Array) -> jax.Array:
    """OpenAI's approximation of GELU."""
    return x * jax.nn.sigmoid(1.702 * x)


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {"gelu": _gelu, "quick_gelu": _quick_gelu}
)
"""Functions by the config's name. The encoder published with Wan has the exact one, gelu."""


class CLIPBlock(nnx.Module):
    """Self-attention, then a feed-forward; both pre-norm."""

    def __init__(self, config: ImageEncoderConfig, dtype: Any, norm_dtype: Any) -> None:
        dim, hidden = config.hidden_size, config.intermediate_size
        self.attn_norm = LayerNorm(dim, norm_dtype, config.layer_norm_eps)
        self.q = Linear(dim, dim, dtype, ("heads", "embed"))
        self.k = Linear(dim, dim, dtype, ("heads", "embed"))
        self.v = Linear(dim, dim, dtype, ("heads", "embed"))
        self.out = Linear(dim, dim, dtype, ("embed", "heads"))
        self.mlp_norm = LayerNorm(dim, norm_dtype, config.layer_norm_eps)
        self.fc1 = Linear(dim, hidden, dtype, ("mlp", "embed"))
        self.fc2 = Linear(hidden, dim, dtype, ("embed", "mlp"))
        self.heads = config.num_attention_heads
        self.activation = ACTIVATIONS[config.hidden_act]

    def _attend(self, x: jax.Array) -> jax.Array:
        """(N, T, D) -> float32 (N, T, D)."""
        q, k, v = (
            proj(x).reshape(*x.shape[:2], self.heads, x.shape[2] // self.heads)
            for proj in (self.q, self.k, self.v)
        )
        scores = jnp.einsum("NSHK,NTHK->NHST", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1).astype(x.dtype)
        out = jnp.einsum("NHST,NTHK->NSHK", weights, v, preferred_element_type=jnp.float32)
        return self.out(out.astype(x.dtype).reshape(x.shape), out_dtype=jnp.float32)

    def __call__(self, x: jax.Array, dtype: Any) -> jax.Array:
        """Applies one layer to the residual stream, float32 (N, T, D), with matmuls in dtype."""
        x = x + self._attend(self.attn_norm(x).astype(dtype))
        hidden = self.fc1(self.mlp_norm(x).astype(dtype), out_dtype=jnp.float32)
        return x + self.fc2(self.activation(hidden).astype(dtype), out_dtype=jnp.float32)


class CLIPImageEncoder(nnx.Module):
    """The encoder with every parameter of a checkpoint; the last layer and ``post_norm`` are never read.

    ``dtype`` is the storage dtype of the matmul weights, ``norm_dtype`` that of norms and of the class and
    position embeddings.
    """

    def __init__(
        self, config: ImageEncoderConfig, dtype: Any = jnp.bfloat16, norm_dtype: Any = jnp.float32
    ) -> None:
        self.config = config
        dim, patch_in = config.hidden_size, config.num_channels * config.patch_size**2
        self.patch_embedding = Linear(patch_in, dim, dtype, ("embed", None), bias=False)
        self.class_embedding = param((dim,), norm_dtype, ("embed",))
        self.position_embedding = param((config.num_tokens, dim), norm_dtype, (None, "embed"))
        self.pre_norm = LayerNorm(dim, norm_dtype, config.layer_norm_eps)
        self.blocks = stacked(CLIPBlock(config, dtype, norm_dtype), config.num_hidden_layers)
        self.post_norm = LayerNorm(dim, norm_dtype, config.layer_norm_eps)

    def _patches(self, pixels: jax.Array) -> jax.Array:
        """(N, S, S, C) -> the values of every patch (N, patches, C·patch²), in the conv weight's order."""
        N, _, _, C = pixels.shape
        grid, patch = self.config.grid, self.config.patch_size
        x = pixels[:, : grid * patch, : grid * patch].reshape(N, grid, patch, grid, patch, C)
        return x.transpose(0, 1, 3, 5, 2, 4).reshape(N, grid**2, C * patch**2)

    def _embed(self, pixels: jax.Array, dtype: Any) -> jax.Array:
        """(N, S, S, C) -> float32 (N, T, D), normalised: the input of the first layer."""
        patches = self.patch_embedding(self._patches(pixels).astype(dtype), out_dtype=jnp.float32)
        first = self.class_embedding[...].astype(jnp.float32)
        first = jnp.broadcast_to(first, (len(pixels), 1, len(first)))
        x = jnp.concatenate([first, patches], axis=1)
        return self.pre_norm(x + self.position_embedding[...].astype(jnp.float32))

    def __call__(self, pixels: jax.Array, dtype: Any) -> jax.Array:
        """Returns the image tokens (N, T, D) in dtype, which are the input of the last layer.

        Pixels are float32 (N, S, S, 3), S the config's image_size, normalised like the image processor's;
        another size raises ValueError. Matmuls are in dtype. The residual stream stays in float32, which
        costs nothing for so few tokens: the reference in bfloat16 is 1.8 times as far from float32.
        """
        size = self.config.image_size
        if pixels.shape[1:] != (size, size, self.config.num_channels):
            raise ValueError(f"pixels of shape {pixels.shape}, not {size} x {size} x 3")
        # A scan would need a slice of all rows but the last, which is a copy; indexing needs none.
        stack = Stack(self.blocks)

        def layer(index: jax.Array, x: jax.Array) -> jax.Array:
            return constrain(stack.at(index)(x, dtype))

        layers = self.config.num_hidden_layers - 1
        return jax.lax.fori_loop(0, layers, layer, self._embed(pixels, dtype)).astype(dtype)
