"""Compiles an exported program for a target: an executable, or its entry in JAX's compilation cache."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanbuild.programs.jax_flags import cache_in, jax_options
from wanbuild.programs.too_large import TooLargeError, refused_bytes
from wanbuild.targets.target import TargetSpec
from wanrun.executables.lowering import lower

if TYPE_CHECKING:
    import jax.stages


CUDNN = 'custom_call_target="__cudnn$'
"""In the text of an executable that calls cuDNN. XLA builds its graphs, and chooses the engines of its
convolutions, only with the GPU: without it an executable loads, and a call fails (docs/notes/chips.md)."""


def compiled_for(target: TargetSpec, name: str, data: bytes, donate: Sequence[str]) -> jax.stages.Compiled:
    """Compiles a serialized program for a target; raises TooLargeError if the compiler refuses its size."""
    with jax_options(jax_traceback_in_locations_limit=0):
        lowered = lower(data, name, donate, target.where, options=target.options_of(name))
        try:
            return lowered.compile()
        except Exception as error:
            if (nbytes := refused_bytes(error)) is None:
                raise
            raise TooLargeError(name, target, nbytes) from error


def compile_into(
    cache: Path, target: TargetSpec, name: str, data: bytes, donate: Sequence[str]
) -> Mapping[str, Any]:
    """Compiles a serialized program into an empty cache folder; returns the compiler's figures.

    Raises TooLargeError if the compiler refuses the program's size.
    """
    started = time.perf_counter()
    with cache_in(cache):
        compiled = compiled_for(target, name, data, donate)
    seconds = time.perf_counter() - started
    memory: Any = compiled.memory_analysis()
    flops = (compiled.cost_analysis() or {}).get("flops", -1.0)
    return {
        "calls_cudnn": target.platform == "cuda" and CUDNN in (compiled.as_text() or ""),
        "compile_seconds": round(seconds, 3),
        **({"flops": flops} if flops >= 0 else {}),  # XLA does not know them for a GPU
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }
