"""The features of this CPU, of which executables for it make use, and the levels of CPUs."""

from __future__ import annotations

from itertools import pairwise

from wanrun.machine.cpu import LEVELS, cpu_features, highest_level, level_rank


def test_features_are_sorted_and_distinct() -> None:
    features = cpu_features()
    assert list(features) == sorted(set(features))
    assert not {"fpu", "vme", "syscall"} & set(features)  # which no code depends on


def test_a_higher_level_has_all_of_a_lower_one() -> None:
    for lower, higher in pairwise(LEVELS.values()):
        assert set(lower) < set(higher)


def test_rank() -> None:
    ranks = [level_rank({"cpu_level": name}) for name in ("cpu-v3", "cpu-v4", "cpu-v4-bf16")]
    assert ranks == [0, 1, 2]
    assert level_rank({}) == 3  # one CPU's own, with everything that it has


def test_the_highest_level() -> None:
    for name, features in LEVELS.items():
        assert highest_level([*features, "sse", "aes"]) == name
    assert highest_level(LEVELS["cpu-v3"][1:]) is None and highest_level(()) is None
