"""The transformer of Self-Forcing: Wan's own, which makes each chunk of latent frames after those before it.

The newest chunks are kept: their keys and values, computed of clean latents at timestep 0. They were computed
when the chunk saw those before it, and never change.

Source: guandeh17/Self-Forcing. It rotates keys by their frame's number in the video before it keeps them;
here they are rotated by their order, which gives the same scores. Those of a sink differ: here it stays next
to the other frames that are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, cast

import jax
import jax.numpy as jnp
from msgspec import Meta

from wanbuild.config import MAX_SIZE, Index, Size
from wanbuild.models.attention import Attention
from wanbuild.models.blocks import KV, Rope, WanBlock
from wanbuild.models.causal import (
    Cache,
    Causal,
    PastAttention,
    Ring,
    Rotations,
    abstract_buffer,
    frames_before,
    layer_of,
    normalised,
    placed,
    written,
)
from wanbuild.models.params import scan_layers
from wanbuild.models.transformer_config import TransformerConfig
from wanrun.artifact.model import Chunking

WHOLE = -1
"""The window of a config that leaves it to the length of a video."""


@dataclass(frozen=True)
class SelfForcingConfig(TransformerConfig):
    """Config of FastVideo's CausalWanTransformer3DModel: the base's fields and three more, in latent frames.

    ``num_frames_per_block`` are those of a chunk. ``local_attn_size`` are those that a chunk sees, its own
    among them; -1: those of a video. ``sink_size`` are the first ones of them, which are kept.
    """

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("CausalWanTransformer3DModel",)

    num_frames_per_block: Size = 3
    local_attn_size: Annotated[int, Meta(ge=WHOLE, le=MAX_SIZE)] = WHOLE
    sink_size: Index = 0

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.image_dim is not None:
            problems.append(f"image_dim is {self.image_dim}, and Self-Forcing takes no image tokens")
        if self.patch_size[0] != 1:
            problems.append(f"patch_size {self.patch_size} joins latent frames, and a chunk has any number")
        least = self.num_frames_per_block + self.sink_size + 1
        if self.local_attn_size != WHOLE and self.local_attn_size < least:
            problems.append(
                f"local_attn_size is {self.local_attn_size}, and a chunk with a sink needs {least}"
            )
        return problems

    @property
    def chunks(self) -> Chunking:
        """How a video is cut into chunks."""
        return Chunking(first=self.num_frames_per_block, each=self.num_frames_per_block)

    def kept(self, frames: int) -> int:
        """Returns how many latent frames are kept for a window of as many; one chunk at least."""
        window = frames if self.local_attn_size == WHOLE else self.local_attn_size
        return max(window - self.num_frames_per_block, self.sink_size + self.num_frames_per_block)


class SelfForcingTransformer(Causal):
    """Wan's transformer, whose chunks see one another through one buffer."""

    config: SelfForcingConfig
    BUFFERS = ("recent",)

    def cache(self, latent_shape: tuple[int, int, int], dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns what is kept of earlier chunks, abstract: see ``Causal.cache``."""
        config, (frames, height, width) = self.config, latent_shape
        _, rows, columns = config.grid((1, height, width))
        heads = config.num_attention_heads, config.attention_head_dim
        kept = config.kept(frames)
        return abstract_buffer("recent", config.num_layers, kept, rows * columns, heads, dtype)

    def _ring(self, cache: Cache, chunk: jax.Array) -> Ring:
        """Returns where the frames before a chunk are."""
        return Ring(cache["recent_k"].shape[2], frames_before(self.chunks, chunk), self.config.sink_size)

    def beside(self, cache: Cache, chunk: jax.Array, latent_shape: tuple[int, int, int]) -> tuple[KV, Rope]:
        """Returns what the steps of a chunk take of the past: see ``Causal.beside``."""
        ring = self._ring(cache, chunk)
        frames, rows, columns = self.config.grid(latent_shape)
        rotations = Rotations(rows, columns, self.config.attention_head_dim, ring.capacity + frames)
        cos, sin = rotations(ring.count + jnp.arange(frames))
        past_cos, past_sin = rotations(ring.order)
        rope = {"cos": cos, "sin": sin, "past_cos": past_cos, "past_sin": past_sin}
        return cache, {**rope, "real": ring.count * rows * columns}

    def remember(
        self,
        cache: Cache,
        kv: Mapping[str, KV],
        latents: jax.Array,
        chunk: jax.Array,
        attention: Attention,
        dtype: Any,
    ) -> Cache:
        """Returns what is kept once a chunk is made: see ``Causal.remember``.

        All layers read what was kept before any of it is replaced, else each would copy the buffers.
        """
        _, _, frames, height, width = latents.shape
        _, rope = self.beside(cache, chunk, (frames, height, width))
        begun = self.begin(latents, jnp.zeros((1, 1)), {}, dtype)
        apply = self.applying(begun["modulation"], rope, (frames, height, width), attention)
        beside = cast(PastAttention, apply.attention)

        def keep(block: WanBlock, carry: tuple[jax.Array, Cache], extra: Any) -> tuple[jax.Array, Cache]:
            (x, new), (own, layer) = carry, extra
            table = block.table(apply.modulation)
            q, k, v = block.unrotated(x, table)
            past = layer_of(cache["recent_k"], layer), layer_of(cache["recent_v"], layer)
            heads = replace(beside, past=past).among(q, k, v, rope["cos"], rope["sin"])
            kept = {"recent_k": normalised(k, block.attn1.heads, dtype), "recent_v": v}
            new = {name: written(new[name], layer, range(frames), kept[name]) for name in new}
            return block.after(x, heads, own, table, beside), new

        new = {
            name: jnp.zeros((*kept.shape[:2], frames, *kept.shape[3:]), kept.dtype)
            for name, kept in cache.items()
        }
        layers = kv["blocks"], jnp.arange(self.config.num_layers)
        _, new = scan_layers(self.blocks, keep, (begun["carry"]["x"], new), layers)
        slots = self._ring(cache, chunk).slots(frames)
        return {name: placed(cache[name], 0, slots, new[name]) for name in cache}
