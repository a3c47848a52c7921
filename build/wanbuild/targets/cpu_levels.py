"""CPU levels as targets: XLA's limits on instructions, and the instructions that an entry may hold."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from wanrun.errors import UsageError
from wanrun.machine.cpu import CPU_LEVEL_FEATURES, cpu_features

_V2 = (
    "INTEL8086 INTEL186 INTEL286 INTEL386 INTEL486 X64 CMOV CPUID CX8 CMPXCHG16B FPU MMX MULTIBYTENOP PAUSE "
    "POPCNT SSE SSE2 SSE3 SSSE3 SSE4_1 SSE4_2"
)
_V3 = f"{_V2} AVX AVX2 BMI1 BMI2 F16C FMA LZCNT MOVBE"
_V4 = f"{_V3} AVX512F AVX512BW AVX512CD AVX512DQ AVX512VL"

_LLVM_V3 = (
    "64bit avx avx2 bmi bmi2 cmov crc32 cx16 cx8 f16c fma fxsr lzcnt mmx movbe popcnt sahf sse sse2 sse3 "
    "sse4.1 sse4.2 ssse3 xsave"
)
_LLVM_V4 = f"{_LLVM_V3} avx512bw avx512cd avx512dq avx512f avx512vl"


@dataclass(frozen=True)
class CpuLevel:
    """A CPU level that executables are built for.

    ``limits`` are values of XLA's option ``xla_cpu_max_isa``, the fastest first. A limit keeps what is not
    newer than it: code for AVX512 uses all of AVX512 that the building CPU has. So a program whose code goes
    beyond the CPU level is compiled again with the next limit.

    ``instructions`` are the feature sets of its instructions, as the disassembler names them, and
    ``recorded`` the features that an entry may say that it needs, as LLVM names them.
    """

    name: str
    limits: tuple[str, ...]
    instructions: frozenset[str]
    recorded: frozenset[str]

    @property
    def features(self) -> tuple[str, ...]:
        """The features that a CPU of the level has, as the system names them."""
        return CPU_LEVEL_FEATURES[self.name]

    def check_host(self) -> None:
        """Raises UsageError if this host's CPU is below the level."""
        missing = sorted(set(self.features) - set(cpu_features()))
        if missing or platform.machine() != "x86_64":
            raise UsageError(
                "unsupported",
                f"target {self.name} cannot be compiled here",
                expected="an x86-64 CPU of at least that level",
                found=f"none of {' '.join(missing)}" if missing else platform.machine(),
                remedy="choose a lower CPU level, or run it on such a CPU",
            )


CPU_LEVELS: Mapping[str, CpuLevel] = MappingProxyType(
    {
        level.name: level
        for level in (
            CpuLevel("cpu-v3", ("AVX2",), frozenset(_V3.split()), frozenset(_LLVM_V3.split())),
            CpuLevel("cpu-v4", ("AVX512", "AVX2"), frozenset(_V4.split()), frozenset(_LLVM_V4.split())),
            CpuLevel(
                "cpu-v4-bf16",
                ("AVX512_BF16", "AVX512", "AVX2"),
                frozenset([*_V4.split(), "AVX512_BF16", "AVX512_VNNI"]),
                frozenset([*_LLVM_V4.split(), "avx512bf16", "avx512vnni"]),
            ),
        )
    }
)
"""CPU levels by name."""
