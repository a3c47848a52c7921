"""Attention: one function, one signature, several forms, of which this module has the one for CPUs.

Axes: B batch, S queries, T keys, N heads, K head dimension. The target determines the form when a program is
built: see ``wanbuild.models.attention_forms``. All forms compute softmax(q kᵀ / √K) v over the keys, or over
those that a mask keeps, because keys may be padded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.loops import map_leading
from wanbuild.models.passes import Passes
from wanbuild.models.tracing import operand

Mask = jax.Array | int | None
"""Which keys count: a bool (T,) whose true ones come first, their number, or None for all of them."""


MOSAIC_HEAD_DIM = 128
"""The head dimension that kernels in Mosaic GPU take; attention of other heads is computed like on a CPU."""


class Attention(Passes, ABC):
    """A form of the attention; arguments and results are those of ``BlockedAttention``."""

    @abstractmethod
    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = None) -> jax.Array: ...

    @abstractmethod
    def partial(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = None
    ) -> tuple[jax.Array, jax.Array]: ...

    def is_kernel(self, dtype: Any, head_dim: int) -> bool:
        """Whether a kernel of ours computes queries of this dtype and width, and not XLA or a library."""
        del dtype, head_dim
        return False


def key_mask(mask: Mask, num_keys: int) -> jax.Array | None:
    """Returns a mask as bool (T,); None if all keys count."""
    return jnp.arange(num_keys) < mask if isinstance(mask, int) else mask


SCORES_BYTES = 64 * 2**20
"""Limit on the float32 scores that ``BlockedAttention`` holds at once.

Blocks above 64 MiB are no faster on the CPU backend, and with this limit a 720p sequence (75 600 tokens)
needs no more memory for scores than for one activation.
"""


MASKED = -1e30
"""The score of a masked key where all keys may be masked: infinity would make NaN of those."""


def _one_head(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
    """q (S, K), k and v (T, K) -> (S, K). The division by the sum comes last, on the smaller array."""
    out, _, total = _weighted(q, k, v, mask, -jnp.inf)
    return (out / total).astype(q.dtype)


def _one_head_partial(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """q (S, K), k and v (T, K) -> float32 (S, K), and the logarithm of the sum, (S, 1)."""
    out, most, total = _weighted(q, k, v, mask, MASKED)
    return out / total, most + jnp.log(total)


def _weighted(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, masked: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the sum of values by weight, float32 (S, K); the largest score; the weights' sum, (S, 1)."""
    # Weights are exp(score - largest score), rounded to bfloat16 where operands are; `masked` is the score of
    # a masked key.
    scale = q.shape[-1] ** -0.5
    q, k, v = operand(q), operand(k), operand(v)
    scores = jax.lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    scores = scores * scale
    if mask is not None:
        scores = jnp.where(mask, scores, masked)
    most = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - most)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jax.lax.dot_general(
        weights.astype(v.dtype), v, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return out, most, total


def _query_blocks(num_queries: int, num_keys: int) -> tuple[int, int]:
    """Returns the number of query blocks that keeps scores within SCORES_BYTES, and queries per block."""
    blocks = min(-(-num_queries * num_keys * 4 // SCORES_BYTES), num_queries)
    return blocks, -(-num_queries // blocks)


@dataclass(frozen=True)
class BlockedAttention(Attention):
    """Computes attention by head and by query block, in bounded memory.

    On the CPU backend one head at a time is faster than a batched einsum (docs/notes/cpu.md, "Attention").
    """

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = None) -> jax.Array:
        """Returns attention, in q's shape and dtype: q is (B, S, N, K), k and v are (B, T, N, K)."""
        return _by_heads(_one_head, q, k, v, mask)  # type: ignore[no-any-return]

    def partial(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = None
    ) -> tuple[jax.Array, jax.Array]:
        """Computes attention to a part of the keys, of which all may be masked.

        Returns the result for these keys, float32 of q's shape, and the logarithm of the sum of their
        weights, float32 (B, S, N, 1).
        """
        return _by_heads(_one_head_partial, q, k, v, mask)  # type: ignore[no-any-return]


blocked_attention = BlockedAttention()


def _by_heads(one_head: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array, kept: Mask) -> Any:
    """Applies a function of one head, (S, K) and (T, K) to arrays (S, ·), to all heads and query blocks."""
    B, S, N, K = q.shape
    T = k.shape[1]
    mask = key_mask(kept, T)
    heads = [x.transpose(0, 2, 1, 3).reshape(B * N, -1, K) for x in (q, k, v)]
    blocks, rows = _query_blocks(S, T)

    def head(qkv: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
        q, k, v = qkv
        if blocks == 1:
            return one_head(q, k, v, mask)
        padded = jnp.pad(q, ((0, blocks * rows - S), (0, 0))).reshape(blocks, rows, K)
        out = map_leading(lambda block: one_head(block, k, v, mask), padded)
        return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[:S], out)

    out = map_leading(head, tuple(heads))
    return jax.tree.map(lambda x: x.reshape(B, N, S, x.shape[-1]).transpose(0, 2, 1, 3), out)


def frame_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns attention of every latent frame's tokens to the few keys of that frame, in q's shape and dtype.

    q is (B, S, N, K), S / T consecutive tokens per frame; k and v are (P, T, J, N, K), B a multiple of P.

    It is one einsum on every platform, because five keys need no blocks. On the CPU backend it takes 0.2 to
    0.4 of the time of ``BlockedAttention`` in bfloat16 and 1 to 1.7 of it in float32, which is 0.1 to 0.4 of
    the time of the query projection.
    """
    P, T, _, N, K = k.shape
    B, S = q.shape[:2]
    frames = q.reshape(P, B // P, T, S // T, N, K)
    scores = jnp.einsum("PBTSNK,PTJNK->PBTNSJ", frames, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * K**-0.5, axis=-1).astype(v.dtype)
    out = jnp.einsum("PBTNSJ,PTJNK->PBTSNK", weights, v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(q.shape)


def merged(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Merges two results of ``Attention.partial``, for two parts of the keys."""
    (out_a, sum_a), (out_b, sum_b) = a, b
    both = jnp.logaddexp(sum_a, sum_b)
    return out_a * jnp.exp(sum_a - both) + out_b * jnp.exp(sum_b - both), both
