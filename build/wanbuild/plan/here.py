"""This machine as a chip to plan for. A CPU's rates are measured in a second, and kept if it was idle."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.programs.jax_flags import pinned
from wanbuild.targets.chip import Chip
from wanbuild.targets.chips import CHIPS
from wanbuild.targets.target import ATTACHED, TargetSpec, platforms_of, resolve_target
from wanrun.errors import UsageError
from wanrun.machine.environment import usable_cores
from wanrun.machine.memory import host_memory_bytes
from wanrun.machine.rates import Rates
from wanrun.timing.clock import now

NAMES = ("local", "cpu")
"""The names of targets that are this machine."""

_ROWS, _SUMMED, _FEATURES = 1024, 1536, 4096
"""Sizes of the measured product, large enough that a larger one is not faster."""

_VALUES = 2**25
"""Values of the float32 array that is read and written: more than caches hold."""

_TIMES = 3
"""Runs of each computation, of which the fastest counts: others may use the machine."""


def this_machine(name: str) -> Chip:
    """Returns this machine's CPU, or for ``local`` the accelerator that is attached, if there is one.

    Raises UsageError for an accelerator that is not in the table of chips.
    """
    with pinned(platforms_of([name])):
        target = resolve_target(name)
        if target.platform == "cpu":
            return _cpu(target)
    found = CHIPS.get(target.name.removesuffix(ATTACHED))
    if found is None:
        raise UsageError(
            "wrong_machine",
            f"this machine's accelerator ({target.environment['device_kind']}) is not one to plan for",
            expected=f"one of {', '.join(CHIPS)}",
        )
    return found


def _cpu(target: TargetSpec) -> Chip:
    rates = Rates.of(target.environment, what="products")
    if not (known := rates.known):
        known = _measured(target)
        if os.getloadavg()[0] < usable_cores():  # else it would be slow for good
            rates.learn(known, dict.fromkeys(known, 1.0))
    return Chip(
        name="cpu",
        platform="cpu",
        device_kind=target.environment["device_kind"],
        memory_bytes=host_memory_bytes(),
        bf16=known["bfloat16"],
        float32=known["float32"],
        matrix_unit=1,
        bandwidth=known["bytes"],
        link=known["bytes"],
        host_link=known["bytes"],
        kernels=target.kernels,
        topologies=MappingProxyType({1: ""}),
    )


def _measured(target: TargetSpec) -> dict[str, float]:
    """Returns FLOP/s by the dtype of products, and the bytes of memory that are moved in a second."""
    widened = target.kernels.products == "widened"  # it multiplies in float32
    flops = 2.0 * _ROWS * _SUMMED * _FEATURES
    return {
        "bytes": 8.0 * _VALUES / _fastest(jnp.negative, jnp.ones(_VALUES, jnp.float32)),
        "float32": flops / _product_seconds(jnp.float32),
        "bfloat16": flops / _product_seconds(jnp.float32 if widened else jnp.bfloat16),
    }


def _product_seconds(dtype: Any) -> float:
    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        dimensions = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, weight, dimensions, preferred_element_type=jnp.float32).astype(dtype)

    return _fastest(product, jnp.ones((_ROWS, _SUMMED), dtype), jnp.ones((_FEATURES, _SUMMED), dtype))


def _fastest(function: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    compiled = jax.jit(function).lower(*arguments).compile()
    compiled(*arguments).block_until_ready()

    def once() -> float:
        start = now()
        compiled(*arguments).block_until_ready()
        return now() - start

    return min(once() for _ in range(_TIMES))
