"""Attention of tokens that several devices share, around any implementation of attention on one device.

Three forms, by the axes of the mesh. *Ulysses* (``context``, ``fsdp``): an all-to-all gives each device all
tokens of some heads, and another one brings the result back (arXiv:2309.14509). *Ring* (``ring``): each
device keeps its queries, keys and values pass around, and the results of the parts are merged by the sums of
their weights (arXiv:2310.01889). With both kinds of axes, heads are exchanged within each position of the
ring. Attention to text and images needs no exchange: every device has their keys.

Axes: B batch, S tokens with padding, N heads, K head dimension, P prompts, T keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.attention import Attention, Mask, frame_attention, merged
from wanbuild.models.partition import EXCHANGED, RING, mesh_sizes, spec, token_groups


@dataclass(frozen=True)
class TokenAttention:
    """The attention of a video's tokens, to one another and to keys that stay the same from step to step.

    Args:
        kernel: the attention on one device.
        count: the tokens without padding.
    """

    kernel: Attention
    count: int

    def among(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Attention of all tokens to all tokens; padding is no key. (B, S, N, K) each, and the result."""
        if not mesh_sizes():
            return self.kernel(q, k, v)
        return _on_each_device(self._among, [q, k, v], ("videos", "tokens", "heads", None))

    def to(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Attention to keys and values that every device has, by heads.

        Videos of one prompt attend to the same keys, as more queries instead of copied keys.

        Args:
            q: (B, S, N, K), B a multiple of P.
            k: (P, T, N, K).
            v: like k.
            mask: bool (T,), true for keys that count; None if all do.
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
        """Attention of every latent frame's tokens to the few keys of that frame.

        Args:
            q: (B, S, N, K), ``count`` / F consecutive tokens per frame.
            k: (P, F, J, N, K), B a multiple of P.
            v: like k.
        """
        if not mesh_sizes():
            return frame_attention(q, k, v)
        frames, keys = token_groups(self.count, k.shape[1]), ("prompts", None, None, "heads", None)
        if frames is None:  # one frame
            frames = jnp.zeros(q.shape[1], jnp.int32)
        others = (keys, keys, ("tokens",))
        return _on_each_device(_to_frames, [q, k, v, frames], ("videos", "tokens", "heads", None), others)

    def _to(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
        """One device's part of ``to``. In float32 the sum is of differences from the last key's value.

        Most rows of a text are padding, and alike: their differences are 0. Added up as they are, one by one,
        they drift from the true sum (docs/notes/cpu.md). bfloat16 would round the differences anew.
        """
        B, S, N, K = q.shape
        P = len(k)
        queries = q.reshape(P, B // P * S, N, K)
        if v.dtype != jnp.float32:
            return self.kernel(queries, k, v, mask).reshape(B, S, N, K)
        last = v[:, -1:]
        return (self.kernel(queries, k, v - last, mask) + last).reshape(B, S, N, K)

    def _among(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """One device's part: q, k and v are its tokens."""
        sizes = mesh_sizes()
        exchanged = tuple(axis for axis in EXCHANGED if axis in sizes)
        if exchanged:
            q, k, v = (jax.lax.all_to_all(x, exchanged, 2, 1, tiled=True) for x in (q, k, v))
        out = self._around(q, k, v, sizes[RING]) if RING in sizes else self._whole(q, k, v)
        return jax.lax.all_to_all(out, exchanged, 1, 2, tiled=True) if exchanged else out

    def _whole(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
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
    others: tuple[tuple[str | None, ...], ...] | None = None,
) -> jax.Array:
    """Runs a function on each device's parts of arrays; its result lies like the first of them.

    Args:
        function: takes the parts.
        arrays: the arrays.
        first: names of the first array's axes.
        others: names of the others' axes; None if they are the same.
    """
    names = (first, *(others or (first,) * (len(arrays) - 1)))
    specs = tuple(spec(x.shape, *axes) for x, axes in zip(arrays, names, strict=True))
    return jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)
