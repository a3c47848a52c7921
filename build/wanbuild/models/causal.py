"""Attention of a chunk of latent frames to itself and to chunks before it, whose keys and values are kept.

Keys are kept normalised and without rotation. A token's position in time is the order of its frame among
those that are kept and the chunk's own, so it never grows: scores depend only on differences of positions,
and a video may have any length.

Axes: B batch, F latent frames, T tokens, S tokens of a frame, N heads, K head dimension, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from wanbuild.models.attention import Attention
from wanbuild.models.blocks import KV, Rope
from wanbuild.models.loops import from_bits, to_bits
from wanbuild.models.passes import Unrotated
from wanbuild.models.rope import axis_dims, directions
from wanbuild.models.sequence import TokenAttention
from wanbuild.models.transformer import ApplyBlock, WanTransformer
from wanrun.artifact.model import Chunking

Tables = tuple[jax.Array, jax.Array]
"""Cosines and sines, float32 (tokens, K // 2)."""

Cache = dict[str, jax.Array]
"""The cache of earlier chunks: by a buffer's name and ``_k`` or ``_v`` their keys and values, in the
compute dtype (L, B, F, S, N, K), those that are there first; and what else a model keeps. A program for a CPU
has bfloat16 as integers of the same bits: see ``models.loops``."""


def frames_of(chunks: Chunking, number: jax.Array) -> jax.Array:
    """Returns the latent frames of a chunk by its number, int32; 0 for a number below 0."""
    return jnp.where(number < 0, 0, jnp.where(number == 0, chunks.first, chunks.each))


def frames_before(chunks: Chunking, number: jax.Array) -> jax.Array:
    """Returns the latent frames of all chunks before one, int32."""
    return jnp.where(number <= 0, 0, chunks.first + chunks.each * (number - 1))


@dataclass(frozen=True)
class Ring:
    """The frames that a buffer keeps: the first ones of all that were put into it, and the newest.

    ``capacity`` is frames of the buffer, ``total`` those that were put into it, int32. The first ``sink``,
    fewer than ``capacity``, are never replaced.
    """

    capacity: int
    total: jax.Array
    sink: int = 0

    @property
    def count(self) -> jax.Array:
        """The number of frames present, in the first slots, int32."""
        return jnp.minimum(self.total, self.capacity)

    @property
    def order(self) -> jax.Array:
        """The order in time of the frames in all slots, int32 (capacity,)."""
        turning, slots = self.capacity - self.sink, jnp.arange(self.capacity)
        oldest = jnp.where(self.total > self.capacity, (self.total - self.sink) % turning, 0)
        return jnp.where(slots < self.sink, slots, self.sink + (slots - self.sink - oldest) % turning)

    def slots(self, frames: int) -> list[jax.Array]:
        """Returns where so many further frames go."""
        turning = self.capacity - self.sink
        numbers = [self.total + index for index in range(frames)]
        return [jnp.where(n < self.sink, n, self.sink + (n - self.sink) % turning) for n in numbers]


@dataclass(frozen=True)
class Rotations:
    """The rotary tables of a grid of patches at any position in time.

    Args:
        rows: patches of a column.
        columns: patches of a row.
        head_dim: K.
        longest: the number of positions in time.
        pooled: how many times wider and higher a patch is than those by which positions count.
    """

    rows: int
    columns: int
    head_dim: int
    longest: int
    pooled: int = 1

    def __call__(self, times: jax.Array) -> Tables:
        """Returns the tables of the tokens of frames at these positions, int32 (F,)."""
        time, height, width = axis_dims(self.head_dim)
        parts = (
            directions(self.longest, time),
            directions(self.rows, height, self.pooled),
            directions(self.columns, width, self.pooled),
        )

        def table(part: int) -> jax.Array:
            in_time, *in_space = (jnp.asarray(both[part].astype(np.float32)) for both in parts)
            in_time = in_time[jnp.clip(times, 0, self.longest - 1)][:, None, None]
            each = in_time, in_space[0][None, :, None], in_space[1][None, None]
            grid = (len(times), self.rows, self.columns)
            whole = [jnp.broadcast_to(one, (*grid, one.shape[-1])) for one in each]
            return jnp.concatenate(whole, -1).reshape(-1, self.head_dim // 2)

        return table(0), table(1)


@dataclass(frozen=True)
class PastAttention(TokenAttention):
    """The attention of a chunk's tokens, to one another and to those of earlier chunks.

    Args:
        buffers: names of the buffers of the past, in the order of their tokens.
        tables: the rotary tables of these tokens.
        real: how many of them count, from the first, int32.
        zeros: further keys and values of the chunk, all of them 0.
        past: keys and values (B, T, N, K) of one layer; None before ``of_layer``.
    """

    buffers: tuple[str, ...]
    tables: Tables
    real: jax.Array
    zeros: int = 0
    past: tuple[jax.Array, jax.Array] | None = None

    def of_layer(self, kv: KV) -> PastAttention:
        """Returns the attention of one layer, whose part of the cache comes with its keys of text."""
        keys, values = (
            jnp.concatenate([tokens_of(kv[f"{name}_{of}"]) for name in self.buffers], 1) for of in "kv"
        )
        return replace(self, past=(keys, values))

    def among(self, q: Unrotated, k: Unrotated, v: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Attention of the chunk's tokens; arguments and result as of ``TokenAttention.among``."""
        assert self.past is not None
        queries, keys = self._rotated(q, k, v, cos, sin, 1)
        past, values = self.past
        nothing = jnp.zeros((len(v), self.zeros, *v.shape[2:]), v.dtype)
        rotated = rotated_keys(self.kernel, past, self.tables, v.dtype)
        all_keys = jnp.concatenate([keys[0], nothing, rotated], 1)
        all_values = jnp.concatenate([v, nothing, values], 1)
        return self.kernel(
            queries[0], all_keys, all_values, first_of(all_keys, v.shape[1] + self.zeros + self.real)
        )


def first_of(keys: jax.Array, count: jax.Array) -> jax.Array:
    """Returns a mask of the first keys of (B, T, N, K), at least one of them."""
    return jnp.arange(keys.shape[1]) < jnp.maximum(count, 1)


def tokens_of(frames: jax.Array) -> jax.Array:
    """(B, F, S, N, K) -> (B, F S, N, K)."""
    return frames.reshape(len(frames), -1, *frames.shape[3:])


def rotated_keys(kernel: Any, keys: jax.Array, tables: Tables, dtype: Any) -> jax.Array:
    """Returns keys (B, T, N, K), normalised before, as the attention takes them."""
    B, T, N, K = keys.shape
    ones = jnp.ones((B, T, 1), jnp.float32), jnp.ones((N * K,), jnp.float32)
    unrotated = Unrotated(keys.reshape(B, T, N * K), *ones)
    return kernel.rotate(unrotated, *tables, 1.0, dtype, 1)[0]  # type: ignore[no-any-return]


def normalised(keys: Unrotated, heads: int, dtype: Any) -> jax.Array:
    """Returns keys (B, T, N, K) as they are kept."""
    values = keys.values.astype(jnp.float32) * keys.inverse * keys.weight.astype(jnp.float32)
    return values.reshape(*values.shape[:-1], heads, -1).astype(dtype)


def written(
    buffer: jax.Array, layer: jax.Array, slots: Sequence[jax.Array | int], frames: jax.Array
) -> jax.Array:
    """Returns a buffer (L, B, F, S, N, K) with new frames in slots of a layer.

    ``layer`` and each frame's slot are int32; ``frames`` has the tokens of all, (B, T, N, K).
    """
    each = frames.reshape(frames.shape[0], len(slots), -1, *frames.shape[2:])
    return placed(buffer, layer, slots, each[None])


def placed(
    buffer: jax.Array, layer: jax.Array | int, slots: Sequence[jax.Array | int], frames: jax.Array
) -> jax.Array:
    """Returns a buffer (L, B, F, S, N, K) with ``frames``, (layers, B, slots, S, N, K), in slots.

    ``layer`` is the first of the frames' layers, int32 like each frame's slot.
    """
    bits, each = to_bits(buffer), to_bits(frames)
    for index, slot in enumerate(slots):
        where = (layer, 0, slot, *(0,) * (bits.ndim - 3))
        bits = jax.lax.dynamic_update_slice(bits, each[:, :, index : index + 1], where)
    return from_bits(bits, buffer.dtype)


def layer_of(buffer: jax.Array, layer: jax.Array) -> jax.Array:
    """Returns the tokens (B, F S, N, K) of a layer of a buffer (L, B, F, S, N, K)."""
    own = jax.lax.dynamic_index_in_dim(to_bits(buffer), layer, keepdims=False)
    return tokens_of(from_bits(own))


def abstract_buffer(
    name: str, layers: int, frames: int, tokens: int, heads: tuple[int, int], dtype: Any
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns a buffer's keys and values, abstract, for one video; ``heads`` are N and K."""
    one = jax.ShapeDtypeStruct((layers, 1, frames, tokens, *heads), dtype)
    return {f"{name}_k": one, f"{name}_v": one}


class Chunked(WanTransformer):
    """A transformer that makes a video chunk by chunk."""

    @property
    def chunks(self) -> Chunking:
        """How a video is cut into chunks."""
        chunks = self.config.chunks
        assert chunks is not None
        return chunks

    def cache(self, latent_shape: tuple[int, int, int], dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns what is kept of earlier chunks, abstract, for a window of latents of this shape."""
        raise NotImplementedError

    def beside(self, cache: Cache, chunk: jax.Array, latent_shape: tuple[int, int, int]) -> tuple[KV, Rope]:
        """Returns what the steps of a chunk take of the past, and the chunk's rotary tables.

        The first comes with the keys of text, a part for each layer. ``cache`` is what is kept, ``chunk`` the
        chunk's number, int32, and ``latent_shape`` its latent frames, rows and columns.
        """
        raise NotImplementedError

    def condition(self, cache: Cache) -> dict[str, jax.Array]:
        """Returns the part of the past that conditions the steps of a chunk."""
        del cache
        return {}

    def remember(
        self,
        cache: Cache,
        kv: Mapping[str, KV],
        latents: jax.Array,
        chunk: jax.Array,
        attention: Attention,
        dtype: Any,
    ) -> Cache:
        """Returns what is kept once a chunk is made.

        ``cache`` is what was kept before, ``kv`` the cross-attention cache. ``latents`` are the chunk's,
        float32 (1, C, F, h, w), with zeros behind those of a shorter one; ``chunk`` is its number, int32.
        """
        raise NotImplementedError

    def rope(self, latent_shape: tuple[int, int, int]) -> dict[str, jax.Array]:
        """Returns nothing: each chunk has its own tables."""
        del latent_shape
        return {}


class Causal(Chunked):
    """A chunked transformer that keeps keys and values of the past.

    ``beside`` returns its buffers, to be used with the keys and values of text, and with a chunk's rotary
    tables those of the past, ``past_cos`` and ``past_sin``, of which the first ``real`` tokens count.
    """

    BUFFERS: ClassVar[tuple[str, ...]]
    """Names of its buffers, in the order in which their tokens are attended to."""

    def zeros(self, tokens: int) -> int:
        """Returns how many keys that are 0 a chunk of so many tokens attends to."""
        del tokens
        return 0

    def applying(
        self,
        modulation: jax.Array,
        rope: Rope,
        latent_shape: tuple[int, int, int],
        attention: Attention,
        prompt: jax.Array | int | None = None,
        nag: jax.Array | None = None,
    ) -> ApplyBlock:
        """Returns how a step's blocks are applied; see ``WanTransformer.applying``."""
        applying = super().applying(modulation, rope, latent_shape, attention, prompt, nag)
        tables, count = (rope["past_cos"], rope["past_sin"]), applying.attention.count
        past = PastAttention(attention, count, self.BUFFERS, tables, rope["real"], self.zeros(count))
        return replace(applying, attention=past)
