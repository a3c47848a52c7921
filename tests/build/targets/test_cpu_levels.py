"""CPU levels as targets."""

from __future__ import annotations

import platform

import msgspec
import pytest

from helpers.refusals import refuses
from wanbuild.targets import cpu_levels
from wanbuild.targets.cpu_levels import CPU_LEVELS
from wanbuild.targets.target import CPU, PLAIN_CPU, multiplies_bfloat16, resolve_target
from wanrun.artifact.targets import Environment
from wanrun.machine.cpu import CPU_LEVEL_FEATURES, cpu_features


def host_has(name: str) -> bool:
    return set(CPU_LEVEL_FEATURES[name]) <= set(cpu_features())


def test_every_level_of_the_runtime_can_be_built() -> None:
    assert list(CPU_LEVELS) == list(CPU_LEVEL_FEATURES)
    for level in CPU_LEVELS.values():
        assert level.limits[-1] == "AVX2" and {"AVX2", "FMA", "SSE2"} <= level.instructions
        assert ("AVX512F" in level.instructions) == ("avx512f" in level.features)


@pytest.mark.parametrize("name", CPU_LEVEL_FEATURES)
def test_a_level_has_no_more_than_its_features(name: str) -> None:
    if not host_has(name):
        pytest.skip(f"this CPU is below {name}")
    spec = resolve_target(name)
    assert (spec.name, spec.platform, spec.cpu_level) == (name, "cpu", CPU_LEVELS[name])
    assert spec.kernels == (CPU if name.endswith("bf16") else PLAIN_CPU)
    assert spec.environment["cpu_features"] == list(CPU_LEVEL_FEATURES[name])
    assert spec.environment["cpu_level"] == name
    msgspec.convert(spec.environment, Environment)
    assert resolve_target("cpu").cpu_level is None


def test_a_level_that_this_cpu_is_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_levels, "cpu_features", lambda: CPU_LEVEL_FEATURES["cpu-v3"])
    resolve_target("cpu-v3")
    with refuses("unsupported", what="cpu-v4", found="avx512bw avx512cd"):
        resolve_target("cpu-v4")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with refuses("unsupported", what="cpu-v3", expected="x86-64", found="aarch64"):
        resolve_target("cpu-v3")


def test_levels_that_multiply_bfloat16() -> None:
    for name, features in CPU_LEVEL_FEATURES.items():
        assert multiplies_bfloat16(features) == name.endswith("bf16")
