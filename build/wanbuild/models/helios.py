"""The transformer of Helios: a chunk's tokens behind those of a past, whose older frames have larger patches.

Source: diffusers' HeliosTransformer3DModel, and HeliosPipeline for the frames of the past. A chunk is always
at the same positions: the video's first latent frame is at 0, the past follows, the chunk comes last.

Axes as of the base; H tokens of the past, which come first among all S, and R latent frames of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from wanbuild.models.attention import Attention
from wanbuild.models.blocks import KV, Rope, WanAttention, WanBlock
from wanbuild.models.causal import Cache, Chunked
from wanbuild.models.layers import Linear
from wanbuild.models.params import param, stacked
from wanbuild.models.partition import ROTARY, mesh_sizes
from wanbuild.models.passes import Unrotated
from wanbuild.models.rope import axis_dims, pooled_tables
from wanbuild.models.sequence import TokenAttention
from wanbuild.models.transformer import ApplyBlock, Carry, Condition, in_patches
from wanbuild.models.transformer_config import TransformerConfig
from wanrun.artifact.model import Chunking

LONG, MID, RECENT = 16, 2, 1
"""Latent frames of the past that are patched by ``patch_long``, ``patch_mid`` and ``patch_short``, the oldest
first: ``history_sizes`` of HeliosPipeline. The video's first latent frame goes with the last of them."""

PAST = LONG + MID + RECENT
"""R, latent frames of the past."""

MID_POOL, LONG_POOL = 2, 4
"""How many patches of ``patch_short`` one of ``patch_mid`` and ``patch_long`` has along each axis."""

CHUNK = 9
"""Latent frames of a chunk."""

MAX_KEY_SCALE = 10.0


@dataclass(frozen=True)
class HeliosConfig(TransformerConfig):
    """Config of HeliosTransformer3DModel: the base's fields and five more.

    ``rope_dim`` has the parts of a head for frames, rows and columns. With ``guidance_cross_attn`` only the
    chunk attends to the prompt, and with ``zero_history_timestep`` the past is at timestep 0. Where
    ``is_amplify_history`` holds, the past's keys are multiplied by a learned number, of all heads ("scalar")
    or of each ("per_head"): ``history_scale_mode``.
    """

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("HeliosTransformer3DModel",)
    FIXED: ClassVar[Any] = MappingProxyType(
        {**TransformerConfig.FIXED, "rope_theta": 10_000.0, "has_multi_term_memory_patch": True}
    )

    rope_dim: tuple[int, int, int] = (44, 42, 42)
    guidance_cross_attn: bool = True
    zero_history_timestep: bool = True
    is_amplify_history: bool = False
    history_scale_mode: Literal["scalar", "per_head"] = "per_head"

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.image_dim is not None:
            problems.append(f"image_dim is {self.image_dim}, and Helios takes no image tokens")
        if self.rope_dim != (parts := axis_dims(self.attention_head_dim)):
            problems.append(f"rope_dim is {list(self.rope_dim)}, and a head here has {list(parts)}")
        if self.patch_size != (patch := TransformerConfig.patch_size):
            problems.append(f"patch_size is {list(self.patch_size)}, and Helios has {list(patch)}")
        return problems

    @property
    def chunks(self) -> Chunking:
        """How a video is cut into chunks."""
        return Chunking(first=CHUNK, each=CHUNK, alone=True)


@dataclass(frozen=True)
class HistoryAttention(TokenAttention):
    """The attention of tokens of which the first ``past`` are the past's."""

    past: int


class HeliosAttention(WanAttention):
    """Self-attention that multiplies the past's keys."""

    def __init__(self, config: HeliosConfig, dtype: Any, norm_dtype: Any) -> None:
        super().__init__(config, dtype, norm_dtype, ROTARY)
        count = 1 if config.history_scale_mode == "scalar" else config.num_attention_heads
        self.history_key_scale = param((count,), norm_dtype, (None,))

    def amplified(self, k: Unrotated, past: int) -> Unrotated:
        """Returns keys (B, S, N·K) of which the first ``past`` tokens' are multiplied."""
        share = jax.nn.sigmoid(self.history_key_scale[...].astype(jnp.float32))
        scale = jnp.repeat(1 + share * (MAX_KEY_SCALE - 1), k.values.shape[-1] // len(share))
        values = (k.values[:, :past].astype(jnp.float32) * scale).astype(k.values.dtype)
        # The norm's factor is that of the keys as they were.
        return dataclasses.replace(k, values=jnp.concatenate([values, k.values[:, past:]], axis=1))


class HeliosBlock(WanBlock):
    """A block over the past's and the chunk's tokens; its attention is ``HistoryAttention``."""

    attn1: HeliosAttention | WanAttention

    def __init__(self, config: HeliosConfig, dtype: Any, norm_dtype: Any) -> None:
        super().__init__(config, dtype, norm_dtype)
        if config.is_amplify_history:
            self.attn1 = HeliosAttention(config, dtype, norm_dtype)
        self.chunk_alone = config.guidance_cross_attn

    def __call__(
        self,
        x: jax.Array,
        kv: KV,
        modulation: jax.Array,
        rope: Rope,
        attention: TokenAttention,
        groups: jax.Array | None = None,
    ) -> jax.Array:
        table = self.table(modulation)
        q, k, v = self.unrotated(x, table, groups)
        if isinstance(self.attn1, HeliosAttention):
            k = self.attn1.amplified(k, _past_of(attention))
        heads = attention.among(q, k, v, rope["cos"], rope["sin"])
        return self.after(x, heads, kv, table, attention, groups)

    def prompted(self, x: jax.Array, kv: KV, attention: TokenAttention) -> jax.Array:
        if not self.chunk_alone:
            return super().prompted(x, kv, attention)
        past = _past_of(attention)
        return jnp.concatenate([x[:, :past], super().prompted(x[:, past:], kv, attention)], axis=1)


def _past_of(attention: TokenAttention) -> int:
    """Returns the past's tokens."""
    assert isinstance(attention, HistoryAttention)
    return attention.past


class HeliosTransformer(Chunked):
    """The base and three patch embeddings of the past; of earlier chunks only latents are kept.

    Its condition is ``past``, float32 (B, C, R, h, w), the last latent frames before the chunk, zeros where
    there are none, and ``first``, (B, C, 1, h, w), the video's first one. The chunk may be of a smaller size.
    """

    config: HeliosConfig

    def __init__(
        self, config: HeliosConfig, dtype: Any = jnp.bfloat16, norm_dtype: Any = jnp.float32
    ) -> None:
        super().__init__(config, dtype, norm_dtype)
        self.blocks = stacked(HeliosBlock(config, dtype, norm_dtype), config.num_layers)
        patch_in = config.in_channels * config.patch_volume
        self.patch_short = Linear(patch_in, config.dim, dtype, ("embed", None))
        self.patch_mid = Linear(patch_in * MID_POOL**3, config.dim, dtype, ("embed", None))
        self.patch_long = Linear(patch_in * LONG_POOL**3, config.dim, dtype, ("embed", None))

    def cache(self, latent_shape: tuple[int, int, int], dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns ``past`` and ``first``, abstract, for one video of latents of this shape."""
        del dtype
        frames, channels = {"past": PAST, "first": 1}, self.config.in_channels
        return {
            name: jax.ShapeDtypeStruct((1, channels, count, *latent_shape[1:]), jnp.float32)
            for name, count in frames.items()
        }

    def beside(self, cache: Cache, chunk: jax.Array, latent_shape: tuple[int, int, int]) -> tuple[KV, Rope]:
        """Returns nothing, and the rotary tables, which are those of any chunk."""
        del chunk
        _, _, _, rows, columns = cache["past"].shape
        return {}, self.tables(latent_shape, (rows, columns))

    def condition(self, cache: Cache) -> dict[str, jax.Array]:
        """Returns all that is kept."""
        return cache

    def remember(
        self,
        cache: Cache,
        kv: Mapping[str, KV],
        latents: jax.Array,
        chunk: jax.Array,
        attention: Attention,
        dtype: Any,
    ) -> Cache:
        """Returns the last latent frames, and the first one of chunk 0, or that of the chunks before."""
        del kv, attention, dtype
        every = jnp.concatenate([cache["past"], latents], axis=2)
        first = jnp.where(chunk == 0, latents[:, :, :1], cache["first"])
        return {"past": every[:, :, -PAST:], "first": first}

    def tables(self, latent_shape: tuple[int, int, int], past_size: tuple[int, int]) -> dict[str, jax.Array]:
        """Returns the rotary tables of the past and of a chunk: means, where a patch has several positions.

        ``latent_shape`` is latent frames, rows and columns of the chunk, ``past_size`` rows and columns of
        the past's latents.
        """
        frames, *chunk_grid = self.config.grid(latent_shape)
        _, *past_grid = self.config.grid((1, *past_size))
        first, long, mid, recent, chunk = np.split(
            np.arange(1 + PAST + frames), np.cumsum([1, LONG, MID, RECENT])
        )
        short = np.concatenate([first, recent])
        parts = [
            pooled_tables((at, np.arange(rows), np.arange(columns)), self.config.attention_head_dim, pool)
            for at, (rows, columns), pool in (
                (long, past_grid, LONG_POOL),
                (mid, past_grid, MID_POOL),
                (short, past_grid, 1),
                (chunk, chunk_grid, 1),
            )
        ]
        cos, sin = (jnp.concatenate(tables) for tables in zip(*parts, strict=True))
        return {"cos": cos, "sin": sin}

    def time(self, timesteps: jax.Array, condition: Condition) -> tuple[jax.Array, jax.Array]:
        """Embeds timesteps (1 or B, 1), behind timestep 0 if the past has that."""
        if self.config.zero_history_timestep:
            timesteps = jnp.concatenate([jnp.zeros_like(timesteps), timesteps], axis=1)
        return super().time(timesteps, condition)

    def embed(self, latents: jax.Array, condition: Condition, dtype: Any) -> jax.Array:
        """Embeds the past and latents (B, C, T, h, w) as tokens (B, S, D) in dtype.

        Raises ValueError on a mesh, where tokens of both would have to be shared.
        """
        if mesh_sizes():
            raise ValueError("Helios has no form for several devices")
        past = self.embed_past(condition["first"], condition["past"], dtype)
        return jnp.concatenate([past, super().embed(latents, {}, dtype)], axis=1)

    def embed_past(self, first: jax.Array, past: jax.Array, dtype: Any) -> jax.Array:
        """Embeds ``first`` (B, C, 1, h, w) and ``past`` (B, C, R, h, w) as tokens (B, H, D) in dtype."""
        long, mid, recent = jnp.split(past.astype(dtype), np.cumsum([LONG, MID]), axis=2)
        short = jnp.concatenate([first.astype(dtype), recent], axis=2)

        def tokens(layer: Linear, latents: jax.Array, pool: int) -> jax.Array:
            patch = tuple(pool * size for size in self.config.patch_size)
            extra = [(0, -size % by) for size, by in zip(latents.shape[2:], patch, strict=True)]
            whole = jnp.pad(latents, [(0, 0), (0, 0), *extra], mode="edge")
            return layer(in_patches(whole, patch))  # type: ignore[arg-type]

        parts = (
            (self.patch_long, long, LONG_POOL),
            (self.patch_mid, mid, MID_POOL),
            (self.patch_short, short, 1),
        )
        return jnp.concatenate([tokens(*part) for part in parts], axis=1)

    def applying(
        self,
        modulation: jax.Array,
        rope: Rope,
        latent_shape: tuple[int, int, int],
        attention: Attention,
        prompt: jax.Array | int | None = None,
        nag: jax.Array | None = None,
    ) -> ApplyBlock:
        """Returns how a step's blocks are applied to the past and the chunk."""
        apply = super().applying(modulation, rope, latent_shape, attention, prompt, nag)
        count = len(rope["cos"])
        past = count - apply.attention.count
        groups = None
        if self.config.zero_history_timestep:
            groups = (jnp.arange(count) >= past).astype(jnp.int32)
        return dataclasses.replace(apply, attention=HistoryAttention(attention, count, past), groups=groups)

    def end(self, carry: Carry, embedding: jax.Array, latent_shape: tuple[int, int, int]) -> jax.Array:
        """Returns the chunk's velocity, float32 (B, out_channels, T, h, w)."""
        count = math.prod(self.config.grid(latent_shape))
        chunk = {"x": carry["x"][:, -count:]}
        return super().end(chunk, embedding[:, -1:], latent_shape)
