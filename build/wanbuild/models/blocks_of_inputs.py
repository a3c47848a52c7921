"""Weights of 8 bits in which each block of a row's inputs has a scale, as GGUF's Q8_0 has.

A product cannot be scaled afterwards: its terms have different scales. So the weight is widened first, in
float32, and rounded to the dtype of the activations, which gives the bits of a weight stored in that dtype.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.loops import LayerSlice


def in_blocks(weight: jax.Array | LayerSlice, scale: jax.Array | LayerSlice) -> jax.Array | LayerSlice:
    """Returns the values of a weight, float32 (out, in); as a slice if weight and scale are slices.

    The weight is int8 (out, in), the scale float16 (out, in / block).
    """
    if isinstance(weight, LayerSlice) and isinstance(scale, LayerSlice):
        return _ScaledSlice(weight, scale)
    blocks = weight[...].reshape(*scale.shape, -1).astype(jnp.float32)
    return (blocks * scale[..., None].astype(jnp.float32)).reshape(weight.shape)


class _ScaledSlice(LayerSlice):
    """One layer of a stack of such weights, widened where it is read."""

    def __init__(self, weight: LayerSlice, scale: LayerSlice) -> None:
        self._weight, self._scale = weight, scale

    @property
    def shape(self) -> tuple[int, ...]:
        return self._weight.shape

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float32)

    def block(self, start: Any, size: int) -> jax.Array:
        return in_blocks(self._weight.block(start, size), self._scale.block(start, size))[...]
