"""The features of this CPU, of which executables for it make use, and the CPU levels."""

from __future__ import annotations

from itertools import pairwise

from wanrun.machine.cpu import CPU_LEVEL_FEATURES, cpu_features, cpu_level_rank, highest_cpu_level


def test_features_are_sorted_and_distinct() -> None:
    features = cpu_features()
    assert list(features) == sorted(set(features))
    assert not {"fpu", "vme", "syscall"} & set(features)  # which no code depends on


def test_a_higher_level_has_all_of_a_lower_one() -> None:
    for lower, higher in pairwise(CPU_LEVEL_FEATURES.values()):
        assert set(lower) < set(higher)


def test_rank() -> None:
    ranks = [cpu_level_rank({"cpu_level": name}) for name in ("cpu-v3", "cpu-v4", "cpu-v4-bf16")]
    assert ranks == [0, 1, 2]
    assert cpu_level_rank({}) == 3  # one CPU's own, with everything that it has


def test_the_highest_level() -> None:
    for name, features in CPU_LEVEL_FEATURES.items():
        assert highest_cpu_level([*features, "sse", "aes"]) == name
    assert highest_cpu_level(CPU_LEVEL_FEATURES["cpu-v3"][1:]) is None and highest_cpu_level(()) is None
