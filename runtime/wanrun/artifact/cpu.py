"""The instruction-set features of this CPU."""

from __future__ import annotations

from pathlib import Path

CPU_FEATURE_PREFIXES = ("avx", "amx", "sse", "fma", "bmi", "f16c", "aes", "pclmul", "popcnt", "sha", "gfni")
CPU_FEATURE_NAMES = frozenset(
    {"adx", "movbe", "vaes", "vpclmulqdq", "lzcnt", "abm", "rdseed", "asimd", "sve"}
)


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
