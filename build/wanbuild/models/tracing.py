"""How models read weights and multiply on a machine: options that are set around a program's tracing.

XLA's CPU backend has no bfloat16 dynamic-slice or gather, and a TPU copies whole stacks for a bitcast
(``models.loops``); a CPU without bfloat16 instructions multiplies float32 faster (``models.products``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from wanbuild.models.partition import mesh_sizes


@dataclass(frozen=True)
class TraceOptions:
    """How a traced program computes; see ``wanrun.artifact.programs.Kernels``.

    Args:
        cpu: whether the program is for XLA's CPU backend: bfloat16 and 8-bit floats are sliced as integers of
            the same bits, and values that several operations read are computed in blocks that stay in the
            cache.
        widened: whether layers and attention convert bfloat16 operands to float32 before they multiply.
        w8a8: whether layers of 8-bit weights round activations to 8 bits too.
        rounded: whether layers round the results of bfloat16 products before anything else is done to them.
    """

    cpu: bool = True
    widened: bool = False
    w8a8: bool = False
    rounded: bool = False


DEFAULT = TraceOptions()
_OPTIONS = ContextVar("options", default=DEFAULT)


def trace_options() -> TraceOptions:
    """Returns the options of the program that is being traced."""
    return _OPTIONS.get()


def for_one_cpu() -> bool:
    """Whether the program that is being traced is for XLA's CPU backend, and not for a mesh."""
    return trace_options().cpu and not mesh_sizes()


@contextlib.contextmanager
def tracing_with(chosen: TraceOptions) -> Iterator[None]:
    """Sets the options of the programs that are traced in its block, as ``jax.set_mesh`` sets the mesh."""
    before = _OPTIONS.set(chosen)
    try:
        yield
    finally:
        _OPTIONS.reset(before)


def operand(x: jax.Array) -> jax.Array:
    """Returns an operand of a product; float32 in a program that widens bfloat16."""
    if x.dtype != jnp.bfloat16 or not trace_options().widened:
        return x
    # The barrier keeps the conversion out of the product: one pass over one layer's weights.
    return jax.lax.optimization_barrier(x.astype(jnp.float32))
