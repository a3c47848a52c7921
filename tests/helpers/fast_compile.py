"""Compiling for a comparison of what is computed, not of the machine code that ships."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax

FAST_COMPILE: Mapping[str, Any] = MappingProxyType(
    {
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
)
"""The same operations and buffers, in machine code that takes a seventh of the time to make (of a VAE)."""

ARTIFACT_COMPILE: Mapping[str, Any] = MappingProxyType({"xla_backend_optimization_level": 0})
"""For steps of artifacts: half of the time of the options that ship. Without fusion emitters the loop of all
steps would differ in its last bits from single steps."""


def fast_jit(function: Callable[..., Any], **options: Any) -> Any:
    """``jax.jit`` with ``FAST_COMPILE``."""
    return jax.jit(function, compiler_options=dict(FAST_COMPILE), **options)
