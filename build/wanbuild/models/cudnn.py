"""Attention on NVIDIA GPUs: cuDNN's fused kernel. Axes as in ``wanbuild.models.attention``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.attention import MASKED, Attention, Mask, blocked_attention, key_mask

MAX_HEAD_DIM = 128
HEAD_DIM_MULTIPLE = 8


@dataclass(frozen=True)
class CudnnAttention(Attention):
    """Attention by cuDNN's kernel.

    Inputs that cuDNN does not take are computed like on a CPU: float32, and heads of a size that no published
    model has.
    """

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = None) -> jax.Array:
        """Computes attention; arguments and result as of ``BlockedAttention``."""
        if not _taken(q):
            return blocked_attention(q, k, v, mask)
        return jax.nn.dot_product_attention(
            q, k, v, implementation="cudnn", key_value_seq_lengths=_lengths(mask, k)
        )

    def partial(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = None
    ) -> tuple[jax.Array, jax.Array]:
        """Computes attention to a part of the keys; as ``BlockedAttention.partial``."""
        if not _taken(q):
            return blocked_attention.partial(q, k, v, mask)
        # JAX's public function rounds the sums to bfloat16, in which they are wrong by percents.
        from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

        lengths = _lengths(mask, k)
        bounded: dict[str, Any] = {}
        if lengths is not None:
            # cuDNN has no answer for no key at all: it gets one, which then counts for nothing.
            bounded = {
                "q_seqlen": jnp.full(len(q), q.shape[1], jnp.int32),
                "kv_seqlen": jnp.maximum(lengths, 1),
                "mask_type": MaskType.PADDING,
            }
        call: Callable[..., Any] = dot_product_attention
        out, total = call(q, k, v, scale=q.shape[-1] ** -0.5, return_residual=True, **bounded)
        total = total.astype(jnp.float32).transpose(0, 2, 1)[..., None]
        if lengths is not None:
            total = jnp.where(lengths[0] > 0, total, MASKED)
        return out.astype(jnp.float32), total


def _taken(q: jax.Array) -> bool:
    """Whether cuDNN takes queries of this dtype and head dimension."""
    K = q.shape[-1]
    return q.dtype == jnp.bfloat16 and K <= MAX_HEAD_DIM and K % HEAD_DIM_MULTIPLE == 0


def _lengths(mask: Mask, k: jax.Array) -> jax.Array | None:
    """The number of keys that count, int32 (B,); None if all count."""
    kept = key_mask(mask, k.shape[1])
    return None if kept is None else jnp.full(len(k), jnp.sum(kept), jnp.int32)
