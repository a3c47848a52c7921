"""What a machine says of its memory, and what fits into it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from wanrun.machine.memory import (
    Machine,
    control_group_limits,
    device_memory_bytes,
    host_memory_bytes,
)

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


def test_the_cpu_device_has_no_memory_of_its_own() -> None:
    assert device_memory_bytes(jax.devices("cpu")[0]) is None


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


def test_host_memory_of_this_machine() -> None:
    assert 2**28 < host_memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
