"""Memory limits of the device and of the host."""

from __future__ import annotations

__all__ = ["host_memory_bytes"]

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

DEVICE_MARGIN = 0.05
"""Share of device memory left free. A program's temporaries are one block, which the allocator must fit
between the weights; the cross-attention keys and values stay allocated while a program runs that does not
take them (0.8 GB for 14B with guidance)."""

HOST_MARGIN = 0.1
"""Share of host memory left free for the interpreter, the device driver (some GB for a GPU) and other
processes."""


@dataclass(frozen=True)
class Machine:
    """The memory that this process may use.

    ``device_bytes`` is that of one device; None if it does not report it, unused where memory is shared.
    ``separate`` says whether the device has its own memory.
    """

    device_bytes: int | None
    host_bytes: int
    separate: bool

    @classmethod
    def of(cls, *devices: jax.Device) -> Machine:
        """Returns the memory of this process's host and of the smallest of its devices, which are alike."""
        sizes = [nbytes for nbytes in map(device_memory_bytes, devices) if nbytes is not None]
        return cls(min(sizes, default=None), host_memory_bytes(), devices[0].platform != "cpu")

    @property
    def available(self) -> int | None:
        """Bytes for programs, their weights and inputs; None if the device does not report a limit."""
        return self.device_bytes if self.separate else self.host_bytes

    @property
    def margin(self) -> float:
        """The share of ``available`` that is left free."""
        return DEVICE_MARGIN if self.separate else HOST_MARGIN

    def fits(self, nbytes: int) -> bool:
        """Returns whether this many bytes fit where programs run."""
        return self.available is None or nbytes <= (1 - self.margin) * self.available

    def host_fits(self, nbytes: int) -> bool:
        """Returns whether this many bytes fit into host memory."""
        return nbytes <= (1 - HOST_MARGIN) * self.host_bytes


def device_memory_bytes(device: jax.Device) -> int | None:
    """Returns the bytes of a device's own memory that this process may use; None for the CPU, or if unknown.

    On a GPU this is the limit of JAX's allocator, by default three quarters of the memory.
    """
    if device.platform == "cpu":
        return None
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    return limit if limit > 0 else None


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes of host memory for this process: physical memory, or a smaller cgroup limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *control_group_limits(root)])


def control_group_limits(root: Path) -> Iterator[int]:
    """Yields the memory limits, in bytes, of this process's control group and of its parent groups.

    Sources: cgroups(7); the kernel's admin-guide/cgroup-v2 (memory.max) and cgroup-v1/memory
    (memory.limit_in_bytes). A container may see its own group as the root of the tree while
    /proc/self/cgroup names the path outside the container, so missing groups are skipped.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
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
            if text.isdecimal():  # the file may say 'max'
                yield int(text)
