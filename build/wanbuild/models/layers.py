"""Layers shared by the transformer and the text encoder.

Matmul weights keep the checkpoint's (out, in) order, so conversion is only a cast. Every matmul accumulates
into a float32 result: on the CPU backend ``x @ w`` in bfloat16 runs at half the rate of
``dot_general(..., preferred_element_type=float32)`` (BUILD_NOTES.md, "Matmul").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from wanbuild.models.params import param

_WIDENED = ContextVar("widened", default=False)


@contextlib.contextmanager
def widened_products(widened: bool) -> Iterator[None]:
    """Says whether layers that are traced meanwhile widen bfloat16 operands to float32; see ``Kernels``."""
    before = _WIDENED.set(widened)
    try:
        yield
    finally:
        _WIDENED.reset(before)


def _operand(x: jax.Array) -> jax.Array:
    """Returns an operand of a product, in a program that widens them as float32."""
    if x.dtype != jnp.bfloat16 or not _WIDENED.get():
        return x
    # The barrier keeps the conversion out of the product: one pass over one layer's weights.
    return jax.lax.optimization_barrier(x.astype(jnp.float32))


class Linear(nnx.Module):
    """y = x Wᵀ + b with W stored as (out, in); torch.nn.Linear.

    Args:
        in_dim: size of the input's last axis.
        out_dim: size of the output's last axis.
        dtype: dtype of the stored weight and bias.
        axes: logical axes of the weight, (out, in).
        bias: whether there is a bias.
    """

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
        self.has_bias = bias

    def __call__(self, x: jax.Array, out_dtype: Any = None) -> jax.Array:
        """Applies the layer over the last axis; returns x's dtype unless out_dtype is given.

        The product is that of operands in x's dtype, accumulated, with the bias, in float32.
        """
        y = jax.lax.dot_general(
            _operand(x),
            _operand(self.weight[...].astype(x.dtype)),
            (((x.ndim - 1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
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
