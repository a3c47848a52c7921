"""Attention: one function, one signature, an implementation per platform.

Axes: B batch, S queries, T keys, N heads, K head dimension. The target determines the implementation when a
program is built. All implementations compute softmax(q kᵀ / √K) v over the keys, or over the keys that a
mask, bool (T,), keeps, because a target may need padded keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import jax
import jax.numpy as jnp

from wanbuild.models.loops import map_leading


class Attention(Protocol):
    """An implementation; arguments and result are those of ``blocked_attention``."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None
    ) -> jax.Array: ...


SCORES_BYTES = 64 * 2**20
"""Limit on the float32 scores that ``blocked_attention`` holds at once.

Blocks above 64 MiB are no faster on the CPU backend, and with this limit a 720p sequence (75 600 tokens)
needs no more memory for scores than for one activation.
"""


def _one_head(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
    """q (S, K), k and v (T, K) -> (S, K). The division by the sum comes last, on the smaller array."""
    scale = q.shape[-1] ** -0.5
    scores = jax.lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    scores = scores * scale
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jax.lax.dot_general(
        weights.astype(v.dtype), v, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return (out / total).astype(q.dtype)


def _query_blocks(num_queries: int, num_keys: int) -> tuple[int, int]:
    """Returns the number of query blocks that keeps scores within SCORES_BYTES, and queries per block."""
    blocks = min(-(-num_queries * num_keys * 4 // SCORES_BYTES), num_queries)
    return blocks, -(-num_queries // blocks)


def blocked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Computes attention by head and by query block, in bounded memory.

    On the CPU backend one head at a time is faster than a batched einsum (BUILD_NOTES.md, "Attention").

    Args:
        q: queries of shape (B, S, N, K).
        k: keys of shape (B, T, N, K).
        v: values of shape (B, T, N, K).
        mask: bool (T,), true for keys that count; None if all do.

    Returns:
        An array of q's shape and dtype.
    """
    B, S, N, K = q.shape
    T = k.shape[1]
    heads = [x.transpose(0, 2, 1, 3).reshape(B * N, -1, K) for x in (q, k, v)]
    blocks, rows = _query_blocks(S, T)

    def head(qkv: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, k, v = qkv
        if blocks == 1:
            return _one_head(q, k, v, mask)
        padded = jnp.pad(q, ((0, blocks * rows - S), (0, 0))).reshape(blocks, rows, K)
        return map_leading(lambda block: _one_head(block, k, v, mask), padded).reshape(-1, K)[:S]

    out = map_leading(head, tuple(heads))
    return out.reshape(B, N, S, K).transpose(0, 2, 1, 3)


ATTENTION: Mapping[str, Attention] = MappingProxyType({"cpu": blocked_attention})
"""Implementation by the target's platform."""
