"""The memory of this machine: of its device, and of its host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

DEVICE_MARGIN = 0.05
"""Share of the device's memory that is left free: a program's temporaries are one block, which the allocator
has to find between the weights, and the attention's keys and values stay while another program runs that
does not take them (0.8 GB for 14B with guidance)."""

HOST_MARGIN = 0.1
"""Share of the host's memory that is left free, for the interpreter, the device's driver (some GB for a GPU)
and whatever else runs."""


@dataclass(frozen=True)
class Machine:
    """How much memory a process may take.

    Attributes:
        device_bytes: of the device; None if it does not say. Unused where memory is shared.
        host_bytes: of the host.
        separate: whether the device has memory of its own.
    """

    device_bytes: int | None
    host_bytes: int
    separate: bool

    @classmethod
    def of(cls, device: jax.Device) -> Machine:
        """The one that this process runs on, with its device."""
        return cls(device_memory_bytes(device), host_memory_bytes(), device.platform != "cpu")

    @property
    def available(self) -> int | None:
        """Bytes for programs and what they take; None where the device does not say."""
        return self.device_bytes if self.separate else self.host_bytes

    @property
    def margin(self) -> float:
        """The share of that which is left free."""
        return DEVICE_MARGIN if self.separate else HOST_MARGIN

    def fits(self, nbytes: int) -> bool:
        """Whether this much fits where programs run."""
        return self.available is None or nbytes <= (1 - self.margin) * self.available

    def host_fits(self, nbytes: int) -> bool:
        """Whether this much fits into the host's memory."""
        return nbytes <= (1 - HOST_MARGIN) * self.host_bytes


def device_memory_bytes(device: jax.Device) -> int | None:
    """Bytes that this process may take of a device's own memory; None for the CPU or where it does not say.

    On a GPU that is what JAX's allocator was given, by default three quarters of the memory.
    """
    if device.platform == "cpu":
        return None
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    return limit if limit > 0 else None


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process may take of the host: physical memory, or its control group's limit if smaller.

    Args:
        root: where /proc and /sys are.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *control_group_limits(root)])


def control_group_limits(root: Path) -> Iterator[int]:
    """The memory limits, in bytes, of this process's control group and the groups that it is in.

    Sources: cgroups(7); the kernel's admin-guide/cgroup-v2 (memory.max) and cgroup-v1/memory
    (memory.limit_in_bytes). A container may see its own group as the root of the tree while
    /proc/self/cgroup names its path outside, so groups that are not there are passed over.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            tree, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            tree, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts) + 1):
            try:
                text = (
                    tree.joinpath(*parts[:depth], file).read_text(encoding="ascii", errors="replace").strip()
                )
            except OSError:
                continue
            if text.isdecimal():  # or 'max'
                yield int(text)
