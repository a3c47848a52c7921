"""The transformer of AnyFlow-FAR, which makes a video chunk by chunk.

The newest finished chunks are kept as they are, older ones in patches of more cells. Each chunk attends to
those before it; compressed chunks only to compressed ones, so that they never change once compressed.

Source: diffusers' AnyFlowFARTransformer3DModel, which computes all chunks anew after each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from wanbuild.config import Size
from wanbuild.models.anyflow import AnyFlowConfig, AnyFlowTransformer
from wanbuild.models.attention import Attention
from wanbuild.models.blocks import KV, Rope, WanBlock
from wanbuild.models.causal import (
    Cache,
    Causal,
    Ring,
    Rotations,
    abstract_buffer,
    first_of,
    frames_before,
    frames_of,
    layer_of,
    normalised,
    rotated_keys,
    written,
)
from wanbuild.models.layers import Linear
from wanbuild.models.params import scan_layers
from wanbuild.models.sequence import TokenAttention
from wanrun.artifact.model import Chunking

BLOCK = 128
"""The reference fills up a chunk's queries to a multiple of so many tokens, and its keys with as many zeros,
which it does not mask in the steps of a chunk."""


@dataclass(frozen=True)
class AnyFlowFARConfig(AnyFlowConfig):
    """Config of AnyFlowFARTransformer3DModel: AnyFlow's fields and three more.

    ``compressed_patch_size`` is the patch of old chunks. ``full_chunk_limit`` counts the chunks that are not
    compressed, with the one that is made. ``chunk_partition`` has the latent frames of the chunks of a video
    of the published length.
    """

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("AnyFlowFARTransformer3DModel",)

    compressed_patch_size: tuple[Size, Size, Size] = (1, 4, 4)
    full_chunk_limit: Size = 3
    chunk_partition: tuple[Size, ...] = (1, 3, 3, 3, 3, 3, 3, 2)

    def _problems(self) -> list[str]:
        problems = super()._problems()
        time, height, width = self.patch_size
        fitting = self.compressed_patch_size == (time, height * self.pooled, width * self.pooled)
        if time != 1 or not fitting:
            problems.append(
                f"compressed_patch_size is {self.compressed_patch_size}, no multiple of {self.patch_size}"
            )
        if self.full_chunk_limit < 2:
            problems.append(
                f"full_chunk_limit is {self.full_chunk_limit}, and a chunk needs the one before it"
            )
        first, *others, last = self.chunk_partition
        if others and not (len(set(others)) == 1 and max(first, last) <= others[0]):
            problems.append(
                f"chunk_partition {self.chunk_partition} has chunks of different lengths in the middle"
            )
        return problems

    @property
    def pooled(self) -> int:
        """How many times wider and higher a patch of an old chunk is."""
        return self.compressed_patch_size[1] // self.patch_size[1]

    @property
    def chunks(self) -> Chunking:
        """How a video is cut into chunks."""
        return Chunking(first=self.chunk_partition[0], each=max(self.chunk_partition))


class AnyFlowFARTransformer(Causal, AnyFlowTransformer):
    """AnyFlow with a second patch embedding, of old chunks."""

    config: AnyFlowFARConfig
    BUFFERS = ("recent", "old")

    def __init__(
        self, config: AnyFlowFARConfig, dtype: Any = jnp.bfloat16, norm_dtype: Any = jnp.float32
    ) -> None:
        super().__init__(config, dtype, norm_dtype)
        patch = config.in_channels * config.patch_volume * config.pooled**2
        self.far_patch_embedding = Linear(patch, config.dim, dtype, ("embed", None))

    @property
    def recent(self) -> int:
        """The finished chunks that are not compressed."""
        return self.config.full_chunk_limit - 1

    def zeros(self, tokens: int) -> int:
        """Returns how many keys that are 0 a chunk of so many tokens attends to."""
        return -tokens % BLOCK

    def cache(self, latent_shape: tuple[int, int, int], dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns what is kept, abstract: buffers, and the latents of chunks that will be compressed.

        Old chunks are kept as long as a video of this length needs them, the newest at least.
        """
        config, (frames, height, width) = self.config, latent_shape
        first, each = self.chunks.first, self.chunks.each
        finished = -(-(frames - first) // each) - self.recent
        old = max(first + each * (finished - 1), each)
        heads = config.num_attention_heads, config.attention_head_dim
        kept = self.recent * each
        rows, columns = self._grid(height, width)
        small = (rows // config.pooled) * (columns // config.pooled)
        return {
            **abstract_buffer("recent", config.num_layers, kept, rows * columns, heads, dtype),
            **abstract_buffer("old", config.num_layers, old, small, heads, dtype),
            "latents": jax.ShapeDtypeStruct((1, config.in_channels, kept, height, width), jnp.float32),
        }

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns of patches of a frame."""
        _, rows, columns = self.config.grid((1, height, width))
        return rows, columns

    def _rotations(self, cache: Cache) -> tuple[Rotations, Rotations]:
        """Returns the rotary tables of patches, and of those of old chunks."""
        rows, columns = self._grid(*cache["latents"].shape[3:])
        head_dim, pooled = self.config.attention_head_dim, self.config.pooled
        kept = cache["old_k"].shape[2] + cache["recent_k"].shape[2] + self.chunks.each
        return (
            Rotations(rows, columns, head_dim, kept),
            Rotations(rows // pooled, columns // pooled, head_dim, kept, pooled),
        )

    def beside(self, cache: Cache, chunk: jax.Array, latent_shape: tuple[int, int, int]) -> tuple[KV, Rope]:
        """Returns what the steps of a chunk take of the past: see ``Causal.beside``."""
        ring = Ring(cache["old_k"].shape[2], frames_before(self.chunks, chunk - self.recent))
        recent = frames_before(self.chunks, chunk) - ring.total
        whole, small = self._rotations(cache)
        cos, sin = whole(ring.count + recent + jnp.arange(latent_shape[0]))
        tables = [whole(ring.count + jnp.arange(cache["recent_k"].shape[2])), small(ring.order)]
        past_cos, past_sin = (jnp.concatenate(both) for both in zip(*tables, strict=True))
        real = recent * cache["recent_k"].shape[3] + ring.count * cache["old_k"].shape[3]
        rope = {"cos": cos, "sin": sin, "past_cos": past_cos, "past_sin": past_sin, "real": real}
        return {name: array for name, array in cache.items() if name != "latents"}, rope

    def compress(self, latents: jax.Array, dtype: Any) -> jax.Array:
        """Embeds latents (1, C, F, h, w) of an old chunk as tokens (1, F S, D)."""
        B, C, F, height, width = latents.shape
        _, ph, pw = self.config.compressed_patch_size
        rows, columns = height // ph, width // pw
        x = latents[:, :, :, : rows * ph, : columns * pw].reshape(B, C, F, rows, ph, columns, pw)
        x = x.transpose(0, 2, 3, 5, 1, 4, 6).reshape(B, F * rows * columns, C * ph * pw)
        return self.far_patch_embedding(x.astype(dtype))

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

        The oldest whole chunk is compressed. The others attend to the compressed one, and are computed again.
        """
        each, kept = self.chunks.each, jnp.concatenate([cache["latents"], latents], 2)
        parts = [self.compress(kept[:, :, :each], dtype), self.embed(kept[:, :, each:], {}, dtype)]
        past = _Past(self, cache, chunk, attention)
        time = self.time(jnp.zeros((1, 1)), {"next_timestep": jnp.float32(0)})[1]
        cos, sin = past.tables()

        def apply(block: WanBlock, carry: tuple[jax.Array, Cache], extra: Any) -> tuple[jax.Array, Cache]:
            (x, buffers), (own, layer) = carry, extra
            table = block.table(time)
            q, k, v = block.unrotated(x, table)
            buffers = past.written(buffers, layer, normalised(k, block.attn1.heads, dtype), v)
            factor = attention.query_factor(v.shape[-1])
            queries = attention.rotate(q, cos, sin, factor, v.dtype, 1)[0]
            keys = attention.rotate(k, cos, sin, 1.0, v.dtype, 1)[0]
            heads = past.attended(queries, keys, v, buffers, layer)
            return block.after(x, heads, own, table, TokenAttention(attention, x.shape[1])), buffers

        buffers = {name: array for name, array in cache.items() if name != "latents"}
        layers = jnp.arange(self.config.num_layers)
        _, buffers = scan_layers(
            self.blocks, apply, (jnp.concatenate(parts, 1), buffers), (kv["blocks"], layers)
        )
        return {**buffers, "latents": kept[:, :, each:]}


class _Past:
    """The places of the chunks that are computed when one is remembered, the one that becomes old first."""

    def __init__(
        self, model: AnyFlowFARTransformer, cache: Cache, chunk: jax.Array, attention: Attention
    ) -> None:
        self._attention, self._each = attention, model.chunks.each
        _, _, capacity, self._small, *_ = cache["old_k"].shape
        self._whole = cache["recent_k"].shape[3]
        self._numbers = [chunk - back for back in range(model.recent, -1, -1)]
        self._frames = [frames_of(model.chunks, number) for number in self._numbers]
        self._before = Ring(capacity, frames_before(model.chunks, self._numbers[0]))
        self._ring = Ring(capacity, self._before.total + self._frames[0])
        self._full, self._pooled = model._rotations(cache)
        self._first = self._each * self._small  # tokens of the compressed one

    def _starts(self) -> list[jax.Array]:
        """Returns where each of the whole chunks begins, in frames after the old ones."""
        starts = [jnp.int32(0)]
        for frames in self._frames[1:-1]:
            starts.append(starts[-1] + frames)
        return starts

    def tables(self) -> tuple[jax.Array, jax.Array]:
        """Returns the rotary tables of all tokens."""
        own = jnp.arange(self._each)
        parts = [self._pooled(self._ring.count - self._frames[0] + own)]
        parts += [self._full(self._ring.count + start + own) for start in self._starts()]
        cos, sin = (jnp.concatenate(both) for both in zip(*parts, strict=True))
        return cos, sin

    def written(self, buffers: Cache, layer: jax.Array, keys: jax.Array, values: jax.Array) -> Cache:
        """Returns the buffers with the tokens' keys and values of a layer."""
        kept = dict(buffers)
        for of, tokens in (("k", keys), ("v", values)):
            old, *whole = self._split(tokens)
            slots = self._before.slots(self._each)
            kept[f"old_{of}"] = written(kept[f"old_{of}"], layer, slots, old)
            for start, one in zip(self._starts(), whole, strict=True):
                slots = [start + index for index in range(self._each)]
                kept[f"recent_{of}"] = written(kept[f"recent_{of}"], layer, slots, one)
        return kept

    def _split(self, tokens: jax.Array) -> Sequence[jax.Array]:
        """Returns the tokens (B, T, ...) of each chunk."""
        size = self._each * self._whole
        return jnp.split(tokens, [*range(self._first, tokens.shape[1], size)], axis=1)

    def attended(
        self, queries: jax.Array, keys: jax.Array, values: jax.Array, buffers: Cache, layer: jax.Array
    ) -> jax.Array:
        """Returns the heads of all tokens: each chunk attends to itself and to those before it."""
        old = rotated_keys(self._attention, layer_of(buffers["old_k"], layer), self._order(), values.dtype)
        keys_of, values_of = [old], [layer_of(buffers["old_v"], layer)]
        real, each = (
            self._ring.count * self._small,
            zip(self._split(queries), self._split(keys), self._split(values), self._frames, strict=True),
        )
        heads = []
        for index, (query, key, value, frames) in enumerate(each):
            if index:  # the first one is among the old ones
                keys_of, values_of = [key, *keys_of], [value, *values_of]
                real = real + frames * self._whole
            all_keys = jnp.concatenate(keys_of, 1)
            heads.append(
                self._attention(query, all_keys, jnp.concatenate(values_of, 1), first_of(all_keys, real))
            )
        return jnp.concatenate(heads, 1)

    def _order(self) -> tuple[jax.Array, jax.Array]:
        """Returns the rotary tables of the old chunks' buffer."""
        return self._pooled(self._ring.order)
