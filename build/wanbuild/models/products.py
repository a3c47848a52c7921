"""Products of activations with a layer's weight, x Wᵀ, in the forms that machines and dtypes ask for.

Matmul weights keep the checkpoint's (out, in) order, so conversion is only a cast. Every matmul accumulates
into a float32 result: on the CPU backend ``x @ w`` in bfloat16 runs at half the rate of
``dot_general(..., preferred_element_type=float32)`` (docs/notes/cpu.md, "Matmul").
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.loops import LayerSlice, from_bits, to_bits
from wanbuild.models.tracing import for_one_cpu, operand, trace_options
from wanrun import EIGHT_BITS

FEW_ROWS = 320
"""Up to this many rows of a product, its weight is sliced from the stack block by block (docs/notes/cpu.md,
"Forms"). CLIP has 257."""

BLOCK_ROWS = 640
"""Rows of such a block, at most: 5 MB at a width of 4096."""

ADDED_ROWS, FEW_ADDED_ROWS = 512, 48
"""Rows that a product is added to at once, at most and at least (docs/notes/cpu.md, "Forms")."""


def product(x: jax.Array, weight: jax.Array | LayerSlice) -> jax.Array:
    """Returns x Wᵀ over the last axes, float32 (..., out), of any float x (..., in).

    The weight is (out, in), a float or 8 bits. 8-bit values are converted to x's dtype, and the layer applies
    their scales; where ``TraceOptions.w8a8`` asks for it, x is rounded to the weight's dtype instead. Where
    ``TraceOptions.rounded`` asks for it, a product of bfloat16 x with a float weight is rounded to bfloat16:
    cuBLAS then writes half the bytes.
    """
    eight_bit = weight.dtype.name in EIGHT_BITS
    if trace_options().w8a8 and eight_bit:
        return _product_in_eight_bits(x, weight[...])
    if trace_options().rounded and x.dtype == jnp.bfloat16 and not eight_bit:
        return _dot(x, weight[...].astype(x.dtype), x.dtype)
    if isinstance(weight, LayerSlice) and math.prod(x.shape[:-1]) <= FEW_ROWS:
        return _product_by_block(x, weight)
    return _dot(operand(x), operand(weight[...].astype(x.dtype)), jnp.float32)


def added_product(y: jax.Array, x: jax.Array, weight: jax.Array | LayerSlice) -> jax.Array:
    """Returns y + x Wᵀ, in y's dtype: y is (..., out), x (..., in), and the weight (out, in), all floats.

    A program for one CPU adds equal blocks of rows in place: they stay in the cache, and there is no other
    array of y's size, which is the largest of a layer.
    """
    rows = math.prod(x.shape[:-1])
    size = max(size for size in range(1, ADDED_ROWS + 1) if rows % size == 0)
    if not for_one_cpu() or size < FEW_ADDED_ROWS or rows == size:
        return y + product(x, weight).astype(y.dtype)
    blocks, whole = to_bits(x.reshape(-1, size, x.shape[-1])), weight[...]

    def add(index: jax.Array, y: jax.Array) -> jax.Array:
        own = from_bits(blocks[index], x.dtype)
        return y.at[index].add(product(own, whole).astype(y.dtype))

    start = y.reshape(-1, size, y.shape[-1])
    return jax.lax.fori_loop(0, rows // size, add, start).reshape(y.shape)


def _dot(x: jax.Array, weight: jax.Array, result: jax.typing.DTypeLike) -> jax.Array:
    return jax.lax.dot_general(
        x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())), preferred_element_type=result
    )


def _product_in_eight_bits(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the same with each token's activations rounded to the weight's dtype (W8A8)."""
    # A token's scale is its largest magnitude over the dtype's, and multiplies its row of the product. Sums
    # are int32, of 2^17 terms at most, or float32.
    own = EIGHT_BITS[weight.dtype.name]
    largest, whole = own.largest, own.whole
    x = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    # A token of zeros has the smallest scale; one that is not finite gives no numbers.
    scale = jnp.maximum(most / largest, jnp.finfo(jnp.float32).tiny)
    # A quotient may come out above the largest value, by its last bit; an 8-bit float has nothing there.
    rows = jnp.clip(x / scale, -largest, largest)
    rows = (jnp.round(rows) if whole else rows).astype(weight.dtype)
    return _dot(rows, weight, jnp.int32 if whole else jnp.float32).astype(jnp.float32) * scale


def _block_rows(rows: int) -> int:
    """Returns the rows of the largest equal blocks that are multiples of 16; all rows if there are none."""
    return max((size for size in range(16, BLOCK_ROWS + 1, 16) if rows % size == 0), default=rows)


def _product_by_block(x: jax.Array, weight: LayerSlice) -> jax.Array:
    """Returns the same for few rows."""
    # A block is still in the cache when it is multiplied. It is the left operand: XLA's CPU backend first
    # rearranges the right one, which for few rows takes as long as the product.
    out_dim = weight.shape[0]
    size = _block_rows(out_dim)
    dtype, x = x.dtype, operand(x)

    def block(start: jax.Array) -> jax.Array:
        return _dot(operand(weight.block(start, size).astype(dtype)), x, jnp.float32)

    y = jax.lax.map(block, jnp.arange(0, out_dim, size))
    return jnp.moveaxis(y.reshape(out_dim, *x.shape[:-1]), 0, -1)


def in_blocks(weight: jax.Array | LayerSlice, scale: jax.Array | LayerSlice) -> jax.Array | LayerSlice:
    """Returns the values of a weight, float32 (out, in); as a slice if weight and scale are slices.

    The weight is int8 (out, in), the scale float16 (out, in / block). A product cannot be scaled afterwards:
    its terms have different scales. So the weight is widened first, in float32, and the caller rounds it to
    the dtype of the activations, which gives the bits of a weight stored in that dtype.
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
