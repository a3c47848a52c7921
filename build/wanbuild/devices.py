"""Opens as many CPU devices as a target has, because JAX's cache key depends on the number of all devices."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from wanrun.machine.environment import open_devices

if TYPE_CHECKING:
    import jax


def open_exactly(platform: str | None, count: int) -> list[jax.Device]:
    """Returns a platform's devices, as ``open_devices`` does; restarts JAX for another number of CPU devices.

    Only a command may call it, between one target and the next: a restart loses all arrays and executables.
    """
    devices = open_devices(platform, count)
    wanted = count if count > 1 else _forced_cpu_devices()
    if devices[0].platform != "cpu" or len(devices) == wanted:
        return devices
    import jax
    from jax.extend import backend

    backend.clear_backends()
    jax.config.update("jax_num_cpu_devices", wanted)
    return jax.devices("cpu")


def _forced_cpu_devices() -> int:
    """Returns the number of CPU devices that XLA's flags ask for; one without such a flag."""
    flags = os.environ.get("XLA_FLAGS", "")
    count = re.search(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(count[1]) if count else 1
