"""The Wan diffusion transformer: patch embedding, condition embedder, one scanned block, output head.

Source: diffusers' WanTransformer3DModel. Axes: B batch, S tokens, N heads, K head dimension, D width,
L layers, P prompts, T text tokens, I image tokens. Matmuls run in the compute dtype with float32
accumulation; norms, modulation and the condition embedder run in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from wanbuild.models.attention import Attention
from wanbuild.models.blocks import KV, Rope, WanBlock, block_kv, modulated
from wanbuild.models.condition_embedder import ConditionEmbedder
from wanbuild.models.layers import Linear
from wanbuild.models.params import param, scan_layers, stacked
from wanbuild.models.partition import (
    constrain,
    gathered_tokens,
    shared_tokens,
    token_groups,
)
from wanbuild.models.prompts import Prompts
from wanbuild.models.rope import rope_tables
from wanbuild.models.sequence import TokenAttention
from wanbuild.models.transformer_config import TransformerConfig

Cache = Mapping[str, KV]
"""Keys and values by stack of blocks: ``blocks``, and a variant's additional stacks."""

Condition = Mapping[str, jax.Array]
"""A video's conditions besides text: ``channels``, float32 (C, T, h, w), which are appended to the latents'
channels, and a variant's other inputs. Empty for text alone."""


@dataclass(frozen=True)
class ApplyBlock:
    """Maps a block, tokens (B, S, D) and one layer of its cache to the next tokens.

    Args:
        modulation: shared by all blocks of a step, as are the other arguments: see ``WanBlock.__call__``.
        rope: the rotary tables.
        attention: the attention of the tokens.
        groups: the row of modulation of each token.
    """

    modulation: jax.Array
    rope: Rope
    attention: TokenAttention
    groups: jax.Array | None

    def __call__(self, block: WanBlock, x: jax.Array, kv: KV) -> jax.Array:
        return block(x, kv, self.modulation, self.rope, self.attention, self.groups)


def spatial_shape(latents: jax.Array) -> tuple[int, int, int]:
    """Returns frames, rows and columns of latents (B, C, T, h, w)."""
    _, _, T, h, w = latents.shape
    return T, h, w


def padded(tokens: jax.Array, multiple: int) -> tuple[jax.Array, jax.Array | None]:
    """Pads tokens (1, I, D) with zeros to a multiple; returns their mask, bool (I,), None if all real."""
    count = tokens.shape[1]
    extra = -count % multiple
    if not extra:
        return tokens, None
    return jnp.pad(tokens, ((0, 0), (0, extra), (0, 0))), jnp.arange(count + extra) < count


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
        self,
        embeddings: jax.Array,
        latent_shape: tuple[int, int, int],
        dtype: Any,
        image_tokens: jax.Array | None = None,
        image_multiple: int = 1,
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """Returns what stays constant over a generation: the cross-attention cache and the rotary tables.

        Args:
            embeddings: prompt embeddings (P, T, text_dim).
            latent_shape: latent frames, rows and columns.
            dtype: compute dtype of the cache.
            image_tokens: the image encoder's tokens, (N, tokens, image_dim), for a model that takes N images.
            image_multiple: image tokens are padded to a multiple of this, and the padding is masked.

        Returns:
            The cache and the rope tables.
        """
        prompts = Prompts.of(embeddings)
        text = prompts.map(lambda rows: self.condition_embedder.text(rows).astype(dtype))
        text = Prompts(constrain(text, "prompts", None, None), prompts.pieces)
        image, mask = None, None
        if image_tokens is not None:
            image, mask = padded(self.condition_embedder.image(image_tokens).astype(dtype), image_multiple)
        cos, sin = rope_tables(self.config.grid(latent_shape), self.config.attention_head_dim)
        rope = {"cos": shared_tokens(cos, 0), "sin": shared_tokens(sin, 0)}
        return self.caches(text, image, mask), rope

    def caches(self, text: Prompts, image: jax.Array | None, mask: jax.Array | None) -> dict[str, Any]:
        """Computes the cache of every stack of blocks; arguments as in ``CrossAttention.kv``."""
        return {"blocks": block_kv(self.blocks, text, image, mask)}

    def patchify(self, latents: jax.Array) -> jax.Array:
        """(B, C, T, h, w) -> tokens of raw values (B, S, C·patch volume), in the order of the conv weight.

        On a mesh S has padding, and devices share the tokens.
        """
        B, C = latents.shape[:2]
        grid = self.config.grid(spatial_shape(latents))
        pt, ph, pw = self.config.patch_size
        t, h, w = grid
        x = latents.reshape(B, C, t, pt, h, ph, w, pw).transpose(0, 2, 4, 6, 1, 3, 5, 7)
        return shared_tokens(x.reshape(B, t * h * w, C * pt * ph * pw), 1)

    def unpatchify(self, tokens: jax.Array, latent_shape: tuple[int, int, int]) -> jax.Array:
        """(B, S, patch volume·C) -> (B, C, T, h, w)."""
        t, h, w = self.config.grid(latent_shape)
        pt, ph, pw = self.config.patch_size
        x = tokens.reshape(-1, t, h, w, pt, ph, pw, self.config.out_channels)
        return x.transpose(0, 7, 1, 4, 2, 5, 3, 6).reshape(len(tokens), -1, *latent_shape)

    def embed(self, latents: jax.Array, condition: Condition, dtype: Any) -> jax.Array:
        """Embeds latents (B, C, T, h, w), with the condition's channels, as tokens (B, S, D) in dtype."""
        if (channels := condition.get("channels")) is not None:
            channels = jnp.broadcast_to(channels, (len(latents), *channels.shape))
            latents = jnp.concatenate([latents, channels], axis=1)
        return self.patch_embedding(self.patchify(latents).astype(dtype))

    def run_blocks(self, x: jax.Array, apply: ApplyBlock, cache: Cache, condition: Condition) -> jax.Array:
        """Runs tokens (B, S, D) through all blocks; a variant also applies its own.

        Args:
            x: the tokens.
            apply: applies a block to tokens, with its keys and values.
            cache: keys and values of every stack.
            condition: inputs of a variant's own blocks.
        """
        del condition
        return scan_layers(self.blocks, apply, x, cache["blocks"])

    def __call__(
        self,
        latents: jax.Array,
        timesteps: jax.Array,
        cache: Cache,
        rope: Rope,
        condition: Condition,
        attention: Attention,
        dtype: Any,
    ) -> jax.Array:
        """Predicts the flow velocity.

        Args:
            latents: float32 (B, C, T, h, w).
            timesteps: float32 () or (B,), or (1 or B, G), where each of the G applies to S / G consecutive
                tokens: G is S for one per token, and T for one per latent frame.
            cache: cross-attention cache for P prompts, B a multiple of P.
            rope: rotary tables.
            condition: conditions shared by all B.
            attention: the attention implementation.
            dtype: compute dtype.

        Returns:
            float32 (B, out_channels, T, h, w).
        """
        timesteps = timesteps if timesteps.ndim == 2 else jnp.atleast_1d(timesteps)[:, None]
        embedding, modulation = self.condition_embedder.time(timesteps)
        count = math.prod(self.config.grid(spatial_shape(latents)))
        groups, among = token_groups(count, timesteps.shape[1]), TokenAttention(attention, count)
        x = self.embed(latents, condition, dtype)
        x = self.run_blocks(x, ApplyBlock(modulation, rope, among, groups), cache, condition)
        head = self.scale_shift_table[...].astype(jnp.float32) + embedding[..., None, :]
        x = modulated(x, head[..., 1, :], head[..., 0, :], self.config.eps, groups).astype(dtype)
        x = gathered_tokens(self.proj_out(x, out_dtype=jnp.float32), count)
        return self.unpatchify(x, spatial_shape(latents))
