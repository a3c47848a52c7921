"""Compiles an exported program for a target: an executable, or its entry in JAX's compilation cache.

XLA refuses a program that the target's memory cannot hold; its message has the size.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from wanbuild.programs.jax_flags import cache_in, jax_options
from wanbuild.targets.target import TargetSpec
from wanrun.artifact.programs import Profile
from wanrun.errors import UsageError
from wanrun.executables.lowering import lower

if TYPE_CHECKING:
    import jax.stages

    from wanbuild.targets.target import TargetSpec


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


_NEEDED = re.compile(r"[Uu]sed ([\d.]+)([KMG]) of|temporaries \(([\d.]+)([KMG])\) exceeds")
"""The message of a TPU's compiler about a program that is too large."""

_UNITS: Mapping[str, int] = MappingProxyType({"K": 2**10, "M": 2**20, "G": 2**30})


class TooLargeError(UsageError):
    """A program does not fit the memory of a target's device, on which it needs ``nbytes``.

    ``profile`` is the profile that it belongs to; None until it is known.
    """

    def __init__(self, program: str, target: TargetSpec, nbytes: int) -> None:
        self.target = target
        self.profile: Profile | None = None
        super().__init__(
            "too_large",
            f"{program} does not fit the memory of target {target.name}",
            expected=f"at most {target.memory_bytes / 1e9:.2f} GB",
            found=f"{nbytes / 1e9:.2f} GB, {(nbytes - target.memory_bytes) / 1e9:.2f} GB too much",
            remedy="build a smaller size, fewer frames or fewer videos",
        )


def refused_bytes(error: Exception) -> int | None:
    """Returns how many bytes a program needs that the compiler refuses; None for another failure."""
    text = str(error)
    found = _NEEDED.search(text) if "RESOURCE_EXHAUSTED" in text else None
    if found is None:
        return None
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return int(float(number) * _UNITS[unit])
