"""Layers shared by the transformer and the text encoder.

Matmul weights keep the checkpoint's (out, in) order, so conversion is only a cast. Every matmul accumulates
into a float32 result: on the CPU backend ``x @ w`` in bfloat16 runs at half the rate of
``dot_general(..., preferred_element_type=float32)`` (docs/notes/cpu.md, "Matmul").
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from wanbuild.models.forms import operand
from wanbuild.models.loops import LayerSlice
from wanbuild.models.params import param

FEW_ROWS = 320
"""Up to this many rows of a product, its weight is sliced from the stack block by block (docs/notes/cpu.md,
"Forms"). CLIP has 257."""

BLOCK_ROWS = 640
"""Rows of such a block, at most: 5 MB at a width of 4096."""


def _block_rows(rows: int) -> int:
    """Returns the rows of the largest equal blocks that are multiples of 16; all rows if there are none."""
    return max((size for size in range(16, BLOCK_ROWS + 1, 16) if rows % size == 0), default=rows)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns x Wᵀ over the last axes in float32, with W in x's dtype."""
    return jax.lax.dot_general(
        operand(x),
        operand(weight.astype(x.dtype)),
        (((x.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def _product_by_block(x: jax.Array, weight: LayerSlice) -> jax.Array:
    """Returns the same for few rows.

    A block is still in the cache when it is multiplied. It is the left operand: XLA's CPU backend first
    rearranges the right one, which for few rows takes as long as the product.
    """
    out_dim = weight.shape[0]
    size = _block_rows(out_dim)
    dtype, x = x.dtype, operand(x)

    def block(start: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            operand(weight.block(start, size).astype(dtype)),
            x,
            (((1,), (x.ndim - 1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    y = jax.lax.map(block, jnp.arange(0, out_dim, size))
    return jnp.moveaxis(y.reshape(out_dim, *x.shape[:-1]), 0, -1)


class Linear(nnx.Module):
    """y = x Wᵀ + b with W stored as (out, in); torch.nn.Linear.

    Args:
        in_dim: size of the input's last axis.
        out_dim: size of the output's last axis.
        dtype: dtype of the stored weight and bias.
        axes: logical axes of the weight, (out, in).
        bias: whether there is a bias.

    A weight that is stored in 8 bits has a ``scale`` too: see ``wanbuild.models.eight_bit``.
    """

    scale: nnx.Param

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        dtype: Any,
        axes: tuple[str | None, str | None],
        bias: bool = True,
    ) -> None:
        self.weight = param((out_dim, in_dim), dtype, axes)
        if bias:
            self.bias = param((out_dim,), dtype, axes[:1])
        self.has_bias, self.has_scale = bias, False

    def __call__(self, x: jax.Array, out_dtype: Any = None) -> jax.Array:
        """Applies the layer over the last axis; returns x's dtype unless out_dtype is given.

        The product is that of operands in x's dtype, accumulated, with the bias, in float32.
        """
        weight = self.weight.get_value()
        if isinstance(weight, LayerSlice) and math.prod(x.shape[:-1]) <= FEW_ROWS:
            y = _product_by_block(x, weight)
        else:
            y = _product(x, weight[...])
        if self.has_scale:
            y = y * self.scale[...]
        if self.has_bias:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(out_dtype or x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Returns x / sqrt(mean(x²) + eps) · scale over the last axis, computed in float32, in x's dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a scale over the last axis; torch.nn.RMSNorm, UMT5LayerNorm."""

    def __init__(self, dim: int, dtype: Any, eps: float, axis: str | None = None) -> None:
        self.weight = param((dim,), dtype, (axis,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)


def layer_norm(x: jax.Array, eps: float) -> jax.Array:
    """Applies layer norm over the last axis without scale or bias; takes any float, returns float32."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    return y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)


class LayerNorm(nnx.Module):
    """Layer norm with scale and bias over the last axis; diffusers' FP32LayerNorm. Returns float32."""

    def __init__(self, dim: int, dtype: Any, eps: float) -> None:
        self.weight = param((dim,), dtype, (None,))
        self.bias = param((dim,), dtype, (None,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return layer_norm(x, self.eps) * self.weight[...].astype(jnp.float32) + self.bias[...].astype(
            jnp.float32
        )
