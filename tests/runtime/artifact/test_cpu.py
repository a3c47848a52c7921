"""The features of this CPU, of which executables for it make use."""

from __future__ import annotations

from wanrun.artifact.cpu import cpu_features


def test_features_are_sorted_and_distinct() -> None:
    features = cpu_features()
    assert list(features) == sorted(set(features))
    assert not {"fpu", "vme", "syscall"} & set(features)  # which no code depends on
