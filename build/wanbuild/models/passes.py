"""The operations on queries, keys and values between their projections and the attention.

Axes: B batch, S tokens, N heads, K head dimension. *Parts* are parts of the heads, which devices exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.rope import apply_rope


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unrotated:
    """Queries or keys that are not normalised yet: a pytree, so that devices take their parts of it.

    ``values`` are a projection (B, S, N·K), any float; ``inverse`` is what the norm multiplies each token by,
    float32 (B, S, 1); ``weight`` is the norm's, (N·K,).
    """

    values: jax.Array
    inverse: jax.Array
    weight: jax.Array


def scaled(x: jax.Array, factor: float, dtype: Any) -> jax.Array:
    """Returns float32 x times a factor, rounded to a dtype once."""
    return (x if factor == 1 else x * factor).astype(dtype)


class Passes:
    """The passes as XLA fuses them. A form of the attention has those that suit it."""

    def query_factor(self, head_dim: int) -> float:
        """Returns what queries of this width are multiplied by in float32, before they are rounded."""
        return 1.0

    def rotate(
        self, x: Unrotated, cos: jax.Array, sin: jax.Array, factor: float, dtype: Any, parts: int
    ) -> jax.Array:
        """Normalises queries or keys, rotates, scales and rounds them to dtype: (parts, B, S, N / parts, K).

        ``cos`` and ``sin`` are float32 (S, K // 2). ``factor`` multiplies the values before they are rounded,
        and ``parts`` divides N.
        """
        B, S, _ = x.values.shape
        normed = x.values.astype(jnp.float32) * x.inverse * x.weight.astype(jnp.float32)
        rotated = apply_rope(normed.reshape(B, S, -1, 2 * cos.shape[-1]), cos, sin)
        return self.by_part(scaled(rotated, factor, dtype), parts)

    def by_part(self, x: jax.Array, parts: int) -> jax.Array:
        """(B, S, N, K) -> (parts, B, S, N / parts, K)."""
        B, S, N, K = x.shape
        return x.reshape(B, S, parts, N // parts, K).transpose(2, 0, 1, 3, 4)

    def joined(self, x: jax.Array) -> jax.Array:
        """Undoes ``by_part``."""
        parts, B, S, N, K = x.shape
        return x.transpose(1, 2, 0, 3, 4).reshape(B, S, parts * N, K)
