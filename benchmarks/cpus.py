"""Names this machine's CPU, and what is a fair reference on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from wanbuild.targets.target import multiplies_bfloat16
from wanrun.machine.cpu import CPU_LEVEL_FEATURES, cpu_features, highest_cpu_level

LIMITS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu-v3": {
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
        },
        "cpu-v4": {
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
            "ATEN_CPU_CAPABILITY": "avx512",
        },
    }
)
"""Variables that limit torch's libraries to a CPU level."""


def cpu_name() -> str:
    """Returns the CPU's name and its CPU level, as in ``AMD EPYC (cpu-v4-bf16)``."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )
    return f"{name} ({highest_cpu_level(cpu_features()) or 'below cpu-v3'})"


def fair_dtype(target: str) -> str:
    """Returns the dtype in which torch is the fastest on the CPUs of a target.

    Without bfloat16 instructions torch's bfloat16 matmul is a plain loop: 10 GFLOP/s on Zen 3,
    and 152 to 162 in float32.

    Args:
        target: ``cpu`` for this machine's, or a CPU level.
    """
    features = CPU_LEVEL_FEATURES.get(target, cpu_features())
    return "bfloat16" if multiplies_bfloat16(features) else "float32"


def limits(target: str) -> dict[str, str]:
    """Returns the variables that limit torch to a target, if this CPU is of a higher level."""
    return {} if target in ("cpu", highest_cpu_level(cpu_features())) else dict(LIMITS.get(target, {}))
