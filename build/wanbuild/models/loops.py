"""``lax.scan`` and ``lax.map`` that slice bfloat16 arrays without widening them.

XLA's CPU backend has no bfloat16 dynamic-slice or gather: it converts the whole array to float32, and each
slice back. Over the stacked weights of a 1.3B transformer that is a 5.5 GB copy in every denoising step. So
sliced arrays are sliced as uint16 of the same bits, and weights are already passed as uint16
(``Kernels.weight_bits`` of the manifest), because a bitcast of a whole array is a copy there too.

A TPU slices bfloat16, and copies whole stacks for a bitcast. Which of both a program is for is said around
its tracing with ``sliced_as_bits``, like the mesh with ``jax.set_mesh``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

_AS_BITS = ContextVar("as_bits", default=True)


@contextlib.contextmanager
def sliced_as_bits(bits: bool) -> Iterator[None]:
    """Says whether programs that are traced meanwhile slice bfloat16 arrays as uint16."""
    before = _AS_BITS.set(bits)
    try:
        yield
    finally:
        _AS_BITS.reset(before)


def to_bits(x: jax.Array) -> jax.Array:
    """Returns a bfloat16 array as uint16 of the same bits, in a program that slices those; else the array."""
    as_bits = x.dtype == jnp.bfloat16 and _AS_BITS.get()
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if as_bits else x


def from_bits(x: jax.Array) -> jax.Array:
    """Returns a uint16 array as bfloat16 of the same bits; returns any other array unchanged."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def scan(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
    """``jax.lax.scan`` over the leading axis of every array in xs; uint16 arrays reach body as bfloat16."""
    return jax.lax.scan(
        lambda carry, bits: body(carry, jax.tree.map(from_bits, bits)), carry, jax.tree.map(to_bits, xs)
    )


def map_leading(function: Callable[[Any], Any], xs: Any) -> Any:
    """``jax.lax.map`` over the leading axis of every array in xs; see ``scan``."""
    return scan(lambda _, x: ((), function(x)), (), xs)[1]
