"""Normalised attention guidance (NAG): a negative prompt inside the attention to text, without a second pass.

Source: arXiv:2505.21179, and its authors' attention processor for Wan. Axes: B batch, S tokens, N heads, K
head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def guided_away(positive: jax.Array, negative: Callable[[], jax.Array], settings: jax.Array) -> jax.Array:
    """Returns attention to the prompt, z_pos (B, S, N, K), moved away from attention to the negative prompt.

    Away is z = scale z_pos - (scale - 1) z_neg. A token's z of an L1 norm above tau times that of z_pos is
    scaled down to it, and the result is alpha z + (1 - alpha) z_pos, in z_pos's dtype. Sums are in float32.
    ``settings`` are scale, tau and alpha, float32 (3,). Where the scale is 1 the result is z_pos itself, and
    ``negative``, which returns z_neg, is not computed.
    """
    scale, tau, alpha = settings

    def guided(positive: jax.Array) -> jax.Array:
        kept, avoided = positive.astype(jnp.float32), negative().astype(jnp.float32)
        away = scale * kept - (scale - 1) * avoided
        size, most = _size(away), tau * _size(kept)
        away = jnp.where(size > most, most / (size + 1e-7), 1) * away
        return (alpha * away + (1 - alpha) * kept).astype(positive.dtype)

    return jax.lax.cond(scale == 1, lambda positive: positive, guided, positive)  # type: ignore[no-any-return]


def _size(x: jax.Array) -> jax.Array:
    """Returns the L1 norm of each token's values, (B, S, 1, 1)."""
    return jnp.sum(jnp.abs(x), axis=(-2, -1), keepdims=True)
