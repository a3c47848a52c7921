"""What a machine has: memory, what it computes in a second, and the features of its CPU."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from wanrun.machine.cpu import CPU_LEVEL_FEATURES, cpu_features, cpu_level_rank, highest_cpu_level
from wanrun.machine.memory import Machine, control_group_limits, device_memory_bytes, host_memory_bytes
from wanrun.machine.rates import Rates

GB = 10**9


def test_what_fits() -> None:
    own, shared = Machine(100, 1000, True), Machine(100, 1000, False)
    assert [machine.available for machine in (own, shared)] == [100, 1000]
    assert [own.fits(nbytes) for nbytes in (95, 96)] == [True, False]
    assert [shared.fits(nbytes) for nbytes in (900, 901)] == [True, False]
    for machine in (own, shared):
        assert [machine.host_fits(nbytes) for nbytes in (900, 901)] == [True, False]
    assert Machine(None, 1000, True).fits(10**15)
    here = Machine.of(jax.devices("cpu")[0])
    assert here == Machine(None, host_memory_bytes(), False)
    assert Machine.of(*jax.devices("cpu") * 2) == here
    several = [Device(platform="gpu", stats={"bytes_limit": size}) for size in (7, 5, 6)]
    assert Machine.of(*several).device_bytes == 5  # type: ignore[arg-type]


class Device(SimpleNamespace):
    def memory_stats(self) -> Any:
        return self.stats


@pytest.mark.parametrize(
    ("platform", "stats", "expected"),
    [
        ("gpu", {"bytes_limit": 60 * GB, "bytes_in_use": 5}, 60 * GB),
        ("tpu", {"bytes_limit": 16 * GB}, 16 * GB),
        ("gpu", {"bytes_in_use": 5}, None),
        ("gpu", {"bytes_limit": -1}, None),
        ("gpu", None, None),
        ("cpu", {"bytes_limit": 60 * GB}, None),
    ],
)
def test_device_memory(platform: str, stats: Any, expected: int | None) -> None:
    assert device_memory_bytes(Device(platform=platform, stats=stats)) == expected  # type: ignore[arg-type]


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


UNLIMITED = 9223372036854771712  # what version 1 says without a limit


HOSTS: dict[str, tuple[dict[str, object], list[int]]] = {
    "no control groups": ({}, []),
    "version 2": ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/memory.max": 300}, [300]),
    "version 2 without a limit": ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/memory.max": "max"}, []),
    "a parent's limit": (
        {
            "proc/self/cgroup": "0::/a/b/c",
            "sys/fs/cgroup/memory.max": "max",
            "sys/fs/cgroup/a/memory.max": 100,
            "sys/fs/cgroup/a/b/memory.max": 200,
            "sys/fs/cgroup/a/b/c/memory.max": "max",
        },
        [100, 200],
    ),
    "a container that sees its group as the root": (
        {"proc/self/cgroup": "0::/docker/123", "sys/fs/cgroup/memory.max": 400},
        [400],
    ),
    "outside its namespace": (
        {"proc/self/cgroup": "0::/../../a", "sys/fs/cgroup/memory.max": 400, "sys/memory.max": 1},
        [400],
    ),
    "version 1": (
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/a:b\n3:cpuset:/a:b\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED,
            "sys/fs/cgroup/memory/a:b/memory.limit_in_bytes": 500,
            "sys/fs/cgroup/cpuset/a:b/memory.limit_in_bytes": 1,
        },
        [UNLIMITED, 500],
    ),
    "nonsense": ({"proc/self/cgroup": "0\nx::\n\n0::/a", "sys/fs/cgroup/a/memory.max": "a lot"}, []),
}


@pytest.mark.parametrize("name", HOSTS)
def test_control_group_limits(tmp_path: Path, name: str) -> None:
    files, limits = HOSTS[name]
    root = write(tmp_path, files)
    assert sorted(control_group_limits(root)) == sorted(limits)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host_memory_bytes(root) == min([physical, *limits])
    assert 2**28 < host_memory_bytes() <= physical  # of this machine


# What it computes in a second.


CPU = {"platform": "cpu", "device_kind": "cpu", "device_count": 1, "jax": "other"}


def test_what_was_measured_is_kept_as_a_mean() -> None:
    rates = Rates.of(CPU, dtype="bfloat16")
    assert rates.known == {} and rates.seconds({"steps": 1.0}) is None
    rates.learn({"steps": 80.0, "decode": 0.0}, {"steps": 10.0, "decode": 3.0, "text": 1.0})
    assert rates.known == {"steps": 8.0}
    rates.learn({"steps": 40.0, "decode": 6.0}, {"steps": 10.0, "decode": 3.0})
    assert Rates.of(CPU, dtype="bfloat16").known == {"steps": 6.0, "decode": 2.0}
    assert rates.seconds({"steps": 60.0, "decode": 4.0, "text": 2.0}) == 13.0  # text as the slowest
    rates.raise_to({"steps": 5.0, "decode": 3.0, "restore": 1.0})
    assert rates.known == {"steps": 6.0, "decode": 3.0, "restore": 1.0}
    assert Rates.of(CPU, dtype="float32").known == Rates.of(CPU | {"device_count": 2}).known == {}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"steps": -1}', b'{"steps": 0}', bytes(2**13)])
def test_a_file_of_another_kind_is_nothing(content: bytes) -> None:
    rates = Rates.of(CPU)
    rates.file.parent.mkdir(parents=True, exist_ok=True)
    rates.file.write_bytes(content)
    assert rates.known == {}


def test_a_cache_that_cannot_be_written_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    Rates.of(CPU).learn({"steps": 1.0}, {"steps": 1.0})
    assert Rates.of(CPU).known == {}


# Its CPU.


def test_features_are_sorted_and_distinct() -> None:
    features = cpu_features()
    assert list(features) == sorted(set(features))
    assert not {"fpu", "vme", "syscall"} & set(features)  # which no code depends on


def test_levels_have_an_order() -> None:
    """Each has all features of the one before; one CPU's own code is above all."""
    for lower, higher in pairwise(CPU_LEVEL_FEATURES.values()):
        assert set(lower) < set(higher)
    ranks = [cpu_level_rank({"cpu_level": name}) for name in ("cpu-v3", "cpu-v4", "cpu-v4-bf16")]
    assert ranks == [0, 1, 2]
    assert cpu_level_rank({}) == 3


def test_the_highest_level() -> None:
    for name, features in CPU_LEVEL_FEATURES.items():
        assert highest_cpu_level([*features, "sse", "aes"]) == name
    assert highest_cpu_level(CPU_LEVEL_FEATURES["cpu-v3"][1:]) is None and highest_cpu_level(()) is None
