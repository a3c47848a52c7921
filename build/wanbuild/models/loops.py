"""``lax.scan`` and ``lax.map`` that slice bfloat16 and 8-bit floats without widening them.

XLA's CPU backend has no dynamic-slice or gather of these: it converts the whole array to a wider float, and
each slice back. Over the stacked weights of a 1.3B transformer that is a 5.5 GB copy in every denoising step.
So sliced arrays are sliced as unsigned integers of the same bits, and weights are already passed so
(``Kernels.weight_bits`` of the manifest), because a bitcast of a whole array is a copy there too.

A TPU slices bfloat16, and copies whole stacks for a bitcast: ``models.tracing`` says which a program is for.

A slice of a stack is a copy in memory before it is multiplied. For few rows that costs as much as their
product. ``LayerSlice`` leaves it to the layer that reads a weight to slice blocks, which stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.tracing import trace_options
from wanrun.artifact.layout import BITS


def to_bits(x: jax.Array) -> jax.Array:
    """Returns floats of ``BITS`` as integers of the same bits, in a program that slices those; else x."""
    as_bits = x.dtype.name in BITS and trace_options().cpu
    return jax.lax.bitcast_convert_type(x, BITS[x.dtype.name]) if as_bits else x


def from_bits(x: jax.Array, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
    """Returns integers as the floats whose bits they are; returns any other array unchanged.

    Integers stand for ``dtype``: uint8 has several meanings, so a parameter gives its declared dtype.
    """
    as_bits = x.dtype.name == BITS.get(jnp.dtype(dtype).name)
    return jax.lax.bitcast_convert_type(x, dtype) if as_bits else x


def scan(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
    """``jax.lax.scan`` over the leading axis of every array in xs; uint16 arrays reach body as bfloat16.

    uint8 arrays are not converted: they are pixels, or weights in one of several formats.
    """
    return jax.lax.scan(
        lambda carry, bits: body(carry, jax.tree.map(from_bits, bits)), carry, jax.tree.map(to_bits, xs)
    )


def map_leading(function: Callable[[Any], Any], xs: Any) -> Any:
    """``jax.lax.map`` over the leading axis of every array in xs; see ``scan``."""
    return scan(lambda _, x: ((), function(x)), (), xs)[1]


def at(x: jax.Array, index: jax.Array | int) -> jax.Array:
    """Returns one entry along the first axis, which stays, of size 1."""
    return from_bits(jax.lax.dynamic_slice_in_dim(to_bits(x), index, 1), x.dtype)


def put(x: jax.Array, index: jax.Array | int, entry: jax.Array) -> jax.Array:
    """Returns an array with another entry along the first axis, as ``at`` returns one."""
    changed = jax.lax.dynamic_update_slice_in_dim(to_bits(x), to_bits(entry), index, 0)
    return from_bits(changed, x.dtype)


class LayerSlice:
    """One layer of a stacked parameter, sliced where it is read.

    ``stack`` is the parameter of all layers, (L, ...), as ``to_bits`` returns it, and ``dtype`` its declared
    dtype, which integers in it stand for.
    """

    def __init__(self, stack: jax.Array, layer: jax.Array | int, dtype: jax.typing.DTypeLike) -> None:
        self._stack, self._layer, self._declared = stack, layer, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one layer's parameter."""
        return self._stack.shape[1:]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of a slice's values."""
        return jax.eval_shape(self._floats, self._stack).dtype

    def __getitem__(self, key: Any) -> jax.Array:
        """Returns the whole slice, or the part that ``key`` selects."""
        return self.block(0, self.shape[0])[key]

    def block(self, start: Any, size: int) -> jax.Array:
        """Returns ``size`` entries along the first axis from ``start``, which may be a traced scalar."""
        starts = (self._layer, start, *(0 for _ in self.shape[1:]))
        return self._floats(jax.lax.dynamic_slice(self._stack, starts, (1, size, *self.shape[1:]))[0])

    def _floats(self, x: jax.Array) -> jax.Array:
        return from_bits(x, self._declared)
