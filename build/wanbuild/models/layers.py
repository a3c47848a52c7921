"""Layers shared by the transformer and the text encoder."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from wanbuild.models.params import param
from wanbuild.models.products import added_product, in_blocks, product
from wanbuild.models.tracing import trace_options


class Linear(nnx.Module):
    """y = x Wᵀ + b with W stored as (out, in), as torch.nn.Linear; ``axes`` are the logical axes of W.

    A weight that is stored in 8 bits has a ``scale`` too, of its rows or of blocks of them: see
    ``wanbuild.models.eight_bit``. A weight may also have slots, ``lora_a`` and ``lora_b``: see
    ``wanbuild.models.low_rank``.
    """

    scale: nnx.Param
    lora_a: nnx.Param
    lora_b: nnx.Param

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
        self.has_bias, self.has_scale, self.has_blocks, self.has_slots = bias, False, False, False

    def __call__(self, x: jax.Array, out_dtype: Any = None) -> jax.Array:
        """Applies the layer over the last axis; returns x's dtype unless out_dtype is given.

        The product (``wanbuild.models.products``) has the dtype in which the bias is added to it.
        """
        weight = self.weight.get_value()
        y = product(x, in_blocks(weight, self.scale.get_value()) if self.has_blocks else weight)
        if self.has_scale:
            y = y * self.scale[...]
        bias = self.bias[...].astype(y.dtype) if self.has_bias else None
        if self.has_slots:
            y, bias = self._changed(x, y, bias)
        return (y if bias is None else y + bias).astype(out_dtype or x.dtype)

    def _changed(self, x: jax.Array, y: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, Any]:
        """Returns a product and what is added to it, one of them with what the slots add, (x Aᵀ) Bᵀ."""
        rows, weight = product(x, self.lora_a.get_value()).astype(x.dtype), self.lora_b.get_value()
        if not self.has_scale:
            return added_product(y, rows, weight), bias
        # Compilers join the scaling with the sum behind it: zeros between the two would change bits.
        change = product(rows, weight).astype(y.dtype)
        return y, change if bias is None else change + bias


def inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    """Returns 1 / sqrt(mean(x²) + eps) over the last axis of float32 (..., D), (..., 1)."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Returns x / sqrt(mean(x²) + eps) · scale over the last axis, computed in float32, in x's dtype."""
    y = x.astype(jnp.float32)
    y = y * inverse_rms(y, eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a scale over the last axis; torch.nn.RMSNorm, UMT5LayerNorm."""

    def __init__(self, dim: int, dtype: Any, eps: float, axis: str | None = None) -> None:
        self.weight = param((dim,), dtype, (axis,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)

    def inverse(self, x: jax.Array) -> jax.Array:
        """Returns what the norm multiplies each row of x by, float32 (..., 1)."""
        inverse = inverse_rms(x.astype(jnp.float32), self.eps)
        # Otherwise a GPU runs the norm as a separate pass, which writes float32 for the rotation to read.
        return inverse if trace_options().cpu else jax.lax.optimization_barrier(inverse)


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
