"""The instruction-set features of this CPU, and the CPU levels that executables are built for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

CPU_FEATURE_PREFIXES = ("avx", "amx", "sse", "fma", "bmi", "f16c", "aes", "pclmul", "popcnt", "sha", "gfni")
CPU_FEATURE_NAMES = frozenset(
    {"adx", "movbe", "vaes", "vpclmulqdq", "lzcnt", "abm", "rdseed", "asimd", "sve"}
)


_V3 = ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "popcnt", "sse4_1", "sse4_2")
_V4 = ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")

CPU_LEVEL_FEATURES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cpu-v3": _V3, "cpu-v4": (*_V3, *_V4), "cpu-v4-bf16": (*_V3, *_V4, "avx512_bf16", "avx512_vnni")}
)
"""The x86-64 CPU levels, the lowest first, with the features that their executables may use, as the system
names them. The first two are those of the x86-64 psABI; Cooper Lake, Sapphire Rapids and Zen 4
have the last."""


def cpu_level_rank(environment: Mapping[str, object]) -> int:
    """Returns the place of a target among the CPU levels; above all of them if it was built for one CPU."""
    levels = list(CPU_LEVEL_FEATURES)
    level = environment.get("cpu_level")
    return levels.index(level) if level in levels else len(levels)


def highest_cpu_level(features: Iterable[str]) -> str | None:
    """Returns the highest CPU level that these features allow; None if it is below all of them."""
    own = set(features)
    fitting = [name for name, needed in CPU_LEVEL_FEATURES.items() if own.issuperset(needed)]
    return fitting[-1] if fitting else None


def cpu_features() -> tuple[str, ...]:
    """Returns the instruction-set features of this CPU, from /proc/cpuinfo; empty if there is no such file.

    Executables for CPUs use the build host's features, but the device kind is only "cpu". An executable with
    an instruction that the CPU lacks would end the process with SIGILL.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            features = value.split()
            return tuple(
                sorted(
                    feature
                    for feature in set(features)
                    if feature.startswith(CPU_FEATURE_PREFIXES)
                    or feature in CPU_FEATURE_NAMES
                    or name.strip() == "Features"
                )
            )
    return ()
