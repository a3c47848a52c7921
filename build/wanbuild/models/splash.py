"""Attention on TPUs: JAX's splash attention, a Pallas kernel whose scores never leave the chip.

The kernel works on whole blocks and has no bound on the keys: a mask, where there is one, is computed for
every score. So the keys that fill whole blocks go through it without a mask, the rest with one, and the two
results are merged. Axes as in ``wanbuild.models.attention``.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    FullMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha_single_device,
)

from wanbuild.models.attention import Mask, key_mask, merged

LANES = 128
"""Lanes of a TPU's vector registers: keys and the head dimension come in multiples of this number."""


@dataclass(frozen=True)
class SplashAttention:
    """Computes attention with the splash kernel.

    Args:
        queries: number of queries in a block.
        keys: number of keys in a block that is brought into the chip's memory.
        computed_keys: keys that are computed at once, a divisor of ``keys`` and a multiple of ``LANES``.
        interpret: whether Pallas interprets the kernel, on any platform.
    """

    queries: int
    keys: int
    computed_keys: int
    interpret: bool = False

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = None) -> jax.Array:
        """Computes attention; arguments and result as of ``BlockedAttention``."""
        count = k.shape[1] if mask is None else mask
        if not isinstance(count, int):
            return self._run(q, k, v, mask)
        whole = count // self.keys * self.keys
        if whole in (0, count):
            return self._run(q, k[:, :count], v[:, :count])
        first = self.partial(q, k[:, :whole], v[:, :whole])
        rest = self.partial(q, k[:, whole:count], v[:, whole:count])
        return merged(first, rest)[0].astype(q.dtype)

    def partial(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = None
    ) -> tuple[jax.Array, jax.Array]:
        """Computes attention to a part of the keys; as ``BlockedAttention.partial``."""
        out, total = self._run(q, k, v, mask, sums=True)
        return out.astype(jnp.float32), total

    def _run(self, q: jax.Array, k: jax.Array, v: jax.Array, kept: Mask = None, sums: bool = False) -> Any:
        """Runs the kernel once.

        Args:
            q: (B, S, N, K).
            k: (B, T, N, K).
            v: like k.
            kept: which keys count.
            sums: whether to return the sums of weights, which the kernel writes 128 times each.

        Returns:
            An array of q's shape and dtype; with sums also their logarithm, float32 (B, S, N, 1).
        """
        B, S, N, K = q.shape
        T = k.shape[1]
        rows, (keys, computed) = min(self.queries, _up(S, LANES)), self._key_blocks(T)
        padded = _up(S, rows), _up(T, keys)
        q = (q.astype(jnp.float32) * K**-0.5).astype(q.dtype)
        q = _by_head(q, padded[0])
        k, v = (_by_head(x, padded[1]) for x in (k, v))
        segments = None
        if kept is not None or padded[1] > T:
            real = jnp.ones(T, bool) if kept is None else key_mask(kept, T)
            ids = jnp.pad(jnp.asarray(real, jnp.int32), (0, padded[1] - T))
            segments = SegmentIds(jnp.ones(padded[0], jnp.int32), ids)
        kernel = make_splash_mha_single_device(
            MultiHeadMask([FullMask(padded)] * (B * N)),
            block_sizes=BlockSizes(block_q=rows, block_kv=keys, block_kv_compute=computed),
            save_residuals=sums,
            interpret=self.interpret,
        )
        # A product of bfloat16 has no higher precision, and Mosaic refuses to be asked for one.
        exact = q.dtype == jnp.float32
        with contextlib.nullcontext() if exact else jax.default_matmul_precision("default"):
            results = kernel(q, k, v, segments)

        def by_token(x: jax.Array, width: int) -> jax.Array:
            return x.reshape(B, N, padded[0], -1)[:, :, :S, :width].transpose(0, 2, 1, 3)

        if not sums:
            return by_token(results, K)
        out, (total,) = results
        return by_token(out, K), by_token(total, 1)

    def _key_blocks(self, num_keys: int) -> tuple[int, int]:
        """Returns the keys in a block, and those computed at once, for this number of keys."""
        if num_keys >= self.keys:
            return self.keys, self.computed_keys
        computed = min(self.computed_keys, _up(num_keys, LANES))
        return _up(num_keys, computed), computed


def _up(size: int, multiple: int) -> int:
    """Returns the least multiple from a size."""
    return -(-size // multiple) * multiple


def _by_head(x: jax.Array, length: int) -> jax.Array:
    """(B, S, N, K) -> (B·N, length, K'), padded with zeros: the kernel has no batch, but many heads."""
    B, S, N, K = x.shape
    x = x.transpose(0, 2, 1, 3).reshape(B * N, S, K)
    return jnp.pad(x, ((0, 0), (0, length - S), (0, -K % LANES)))
