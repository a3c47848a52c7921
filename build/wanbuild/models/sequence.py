"""Attention of tokens that several devices share, around any implementation of attention on one device.

Three forms, by the axes of the mesh. *Ulysses* (``context``, ``fsdp``): an all-to-all gives each device all
tokens of some heads, and another one brings the result back (arXiv:2309.14509). *Ring* (``ring``): each
device keeps its queries, keys and values pass around, and the results of the parts are merged by the sums of
their weights (arXiv:2310.01889). With both kinds of axes, heads are exchanged within each position of the
ring. Attention to text and images needs no exchange: every device has their keys.

Axes: B batch, S tokens with padding, N heads, K head dimension, P prompts, T keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from wanbuild.models.attention import Attention, Mask, frame_attention, merged
from wanbuild.models.partition import EXCHANGED, RING, mesh_sizes, spec, token_groups
from wanbuild.models.passes import Unrotated, scaled


@dataclass(frozen=True)
class TokenAttention:
    """The attention of a video's tokens, to one another and to keys that stay the same from step to step.

    ``kernel`` is the attention on one device; ``count`` is the number of tokens without padding.
    """

    kernel: Attention
    count: int

    def of_layer(self, kv: Mapping[str, jax.Array]) -> TokenAttention:
        """Returns the attention of one layer, whose cache may have more than keys and values of text."""
        del kv
        return self

    def scaled(self, q: jax.Array, dtype: Any) -> jax.Array:
        """Rounds float32 queries (B, S, N, K) to a dtype, scaled as the attention takes them."""
        return scaled(q, self.kernel.query_factor(q.shape[-1]), dtype)

    def among(self, q: Unrotated, k: Unrotated, v: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Returns attention of all tokens to all tokens, in v's shape and dtype; padding does not count.

        v is (B, S, N, K); the rotary tables ``cos`` and ``sin`` are float32 (S, K // 2).
        """
        if not mesh_sizes():
            queries, keys = self._rotated(q, k, v, cos, sin, 1)
            return self.kernel(queries[0], keys[0], v)
        where = spec(v.shape, "videos", "tokens", "heads", None)
        videos, tokens, heads, _ = where
        # Devices cut a projection between heads, although its last axis is of values.
        cuts: tuple[Any, ...] = P(videos, tokens, heads), P(videos, tokens, None), P(heads)
        unrotated = Unrotated(*cuts)
        table = P(tokens, None)
        return jax.shard_map(  # type: ignore[no-any-return]
            self._among,
            in_specs=(unrotated, unrotated, where, table, table),
            out_specs=where,
            check_vma=False,
        )(q, k, v, cos, sin)

    def to(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Returns attention to keys and values that every device has, by heads.

        q is (B, S, N, K), B a multiple of P; k and v are (P, T, N, K). The mask is bool (T,), true for keys
        that count; None if all do. Videos of one prompt attend to the same keys, as more queries instead of
        copied keys.
        """
        if not mesh_sizes():
            return self._to(q, k, v, mask)
        keys = ("prompts", None, "heads", None)
        return _on_each_device(
            lambda q, k, v: self._to(q, k, v, mask),
            [q, k, v],
            ("videos", "tokens", "heads", None),
            others=(keys, keys),
        )

    def to_frames(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Returns attention of every latent frame's tokens to the few keys of that frame.

        q is (B, S, N, K), ``count`` / F consecutive tokens per frame; k and v are (P, F, J, N, K), B a
        multiple of P.
        """
        if not mesh_sizes():
            return frame_attention(q, k, v)
        frames, keys = token_groups(self.count, k.shape[1]), ("prompts", None, None, "heads", None)
        if frames is None:  # one frame
            frames = jnp.zeros(q.shape[1], jnp.int32)
        others = (keys, keys, ("tokens",))
        return _on_each_device(_to_frames, [q, k, v, frames], ("videos", "tokens", "heads", None), others)

    def _to(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Computes one device's part of `to`; in float32 of differences from the last key's value."""
        # Most rows of a text are padding, and alike: their differences are 0. Added up as they are, one by
        # one, they drift from the true sum (docs/notes/cpu.md). bfloat16 would round the differences anew.
        B, S, N, K = q.shape
        P = len(k)
        queries = q.reshape(P, B // P * S, N, K)
        if v.dtype != jnp.float32:
            return self.kernel(queries, k, v, mask).reshape(B, S, N, K)
        last = v[:, -1:]
        return (self.kernel(queries, k, v - last, mask) + last).reshape(B, S, N, K)

    def _rotated(
        self, q: Unrotated, k: Unrotated, v: jax.Array, cos: jax.Array, sin: jax.Array, parts: int
    ) -> tuple[jax.Array, jax.Array]:
        """Returns queries and keys as the attention takes them, (parts, B, S, N / parts, K), in v's dtype."""
        factor = self.kernel.query_factor(v.shape[-1])
        queries = self.kernel.rotate(q, cos, sin, factor, v.dtype, parts)
        return queries, self.kernel.rotate(k, cos, sin, 1.0, v.dtype, parts)

    def _among(self, q: Unrotated, k: Unrotated, v: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """One device's part: the arguments are those of its tokens."""
        sizes = mesh_sizes()
        exchanged = tuple(axis for axis in EXCHANGED if axis in sizes)
        parts = math.prod(sizes[axis] for axis in exchanged)
        rotated = self._rotated(q, k, v, cos, sin, parts)
        out = self._attended(
            *(_heads_of_all(x, exchanged) for x in (*rotated, self.kernel.by_part(v, parts)))
        )
        return self._tokens_of_one(out, exchanged)

    def _tokens_of_one(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Undoes ``_heads_of_all``: (B, n S, N, K) -> (B, S, n N, K)."""
        if not axes:
            return x
        B, S, N, K = x.shape
        n = jax.lax.axis_size(axes)
        parts = x.reshape(B, n, S // n, N * K).transpose(1, 0, 2, 3)
        parts = jax.lax.all_to_all(parts, axes, 0, 0, tiled=True)
        return self.kernel.joined(parts.reshape(n, B, S // n, N, K))

    def _attended(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Attention of a device's queries, to the keys of all devices."""
        if (parts := mesh_sizes().get(RING)) is not None:
            return self._around(q, k, v, parts)
        return self.kernel(q, k, v, self.count if k.shape[1] > self.count else None)

    def _real(self, keys: int, parts: int, part: jax.Array | int) -> Mask:
        """Returns a mask of a part's keys that are not padding; None if no part has padding."""
        if keys * parts == self.count:
            return None
        return part * keys + jnp.arange(keys) < self.count

    def _around(self, q: jax.Array, k: jax.Array, v: jax.Array, parts: int) -> jax.Array:
        """Attention to the keys and values of every device of the ring in turn, starting with its own."""
        here = jax.lax.axis_index(RING)
        onward = [(part, (part + 1) % parts) for part in range(parts)]

        def attend(turn: jax.Array | int, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            mask = self._real(k.shape[1], parts, (here - turn) % parts)
            return self.kernel.partial(q, k, v, mask)

        def turn(carry: Any, number: jax.Array) -> tuple[Any, None]:
            k, v, result = carry
            following = [jax.lax.ppermute(x, RING, onward) for x in (k, v)]  # while this part is computed
            return (*following, merged(result, attend(number, k, v))), None

        nothing = jnp.zeros(q.shape, jnp.float32), jnp.full((*q.shape[:3], 1), -jnp.inf)
        carry, _ = jax.lax.scan(turn, (k, v, nothing), jnp.arange(parts - 1))
        k, v, result = carry
        out, _ = merged(result, attend(parts - 1, k, v))
        return out.astype(q.dtype)


def _heads_of_all(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Exchanges a device's tokens (n, B, S, N, K) for all devices' tokens of one part, (B, n S, N, K)."""
    n, B, S, N, K = x.shape
    if axes:
        x = jax.lax.all_to_all(x.reshape(n, B, S, N * K), axes, 0, 0, tiled=True)
    return x.reshape(n, B, S, N * K).transpose(1, 0, 2, 3).reshape(B, n * S, N, K)


def _to_frames(q: jax.Array, k: jax.Array, v: jax.Array, frames: jax.Array) -> jax.Array:
    """One device's part of ``to_frames``: its tokens need not be whole frames, so other keys are masked."""
    P, F, J, N, K = k.shape
    B, S = q.shape[:2]
    q, k, v = q.reshape(P, B // P, S, N, K), k.reshape(P, F * J, N, K), v.reshape(P, F * J, N, K)
    scores = jnp.einsum("PBSNK,PTNK->PBNST", q, k, preferred_element_type=jnp.float32)
    own = frames[:, None] == jnp.arange(F * J) // J
    weights = jax.nn.softmax(jnp.where(own, scores * K**-0.5, -jnp.inf), axis=-1).astype(v.dtype)
    out = jnp.einsum("PBNST,PTNK->PBSNK", weights, v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(B, S, N, K)


def _on_each_device(
    function: Callable[..., jax.Array],
    arrays: list[jax.Array],
    first: tuple[str | None, ...],
    others: tuple[tuple[str | None, ...], ...],
) -> jax.Array:
    """Runs a function on each device's parts of arrays; its result lies like the first of them."""
    specs = tuple(spec(x.shape, *axes) for x, axes in zip(arrays, (first, *others), strict=True))
    return jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)
