"""Opens devices that are not there: JAX compiles for a topology with the chip's compiler and no chip.

Of CPU devices it opens as many as a target has, because JAX's cache key depends on their number.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from wanbuild.targets.chip import Chip, GpuFacts
from wanrun.errors import UsageError
from wanrun.machine.environment import has_package, open_devices

if TYPE_CHECKING:
    import jax


COMPILERS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "tpu": ("tpu", ("libtpu",)),
        "cuda": ("cuda13", ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13", "nvidia-cuda-nvcc")),
    }
)
"""The extra that brings a platform's compiler, and the packages that make it up; nvcc's has ptxas, which
assembles kernels in Mosaic GPU."""

CUDA = 13
"""The version of CUDA of those packages: from 12 on, XLA has cuBLAS multiply 8-bit floats."""

_SURROUNDINGS: Mapping[str, str] = MappingProxyType(
    {
        "TPU_SKIP_MDS_QUERY": "1",  # no question to a metadata server that only TPU hosts have
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any known one: the topology's name decides
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu else refuses a second process on this host
        "TPU_LOG_DIR": "disabled",  # it else writes to /tmp/tpu_logs
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # no question to a driver
    }
)
"""Variables of the environment with which the compilers start without a chip. None is in a cache key."""

_PREFIXES: Mapping[str, str] = MappingProxyType({"v7x": "tpu7x"})
"""libtpu's names of chips, where they differ."""


@dataclass(frozen=True)
class Topology:
    """Devices that programs can be compiled for but not run on; ``name`` is as the manifest records it."""

    name: str
    devices: tuple[jax.Device, ...]


def open_topology(chip: Chip, count: int) -> Topology:
    """Returns the topology with this many of a chip's devices.

    Raises UsageError if there is no such topology, or the compiler is not installed.
    """
    if count not in chip.counts:
        fitting = [size for size in chip.counts if size >= count] or chip.counts[-1:]
        raise UsageError(
            "unsupported",
            f"{chip.name} does not come with {count} devices",
            expected="one of " + ", ".join(map(str, chip.counts)),
            found=count,
            remedy=f"use a mesh of {fitting[0]} devices",
        )
    _check_compiler(chip.platform, COMPILERS[chip.platform][1])
    from jax.experimental import topologies

    name, arguments = _tpu(chip, count) if chip.topologies is not None else _gpu(chip, count)
    try:
        with _without_chip():
            described = topologies.get_topology_desc(name, platform=chip.platform, **arguments)
    except Exception as error:
        raise UsageError(
            "not_installed",
            f"the compiler for {chip.name} does not start",
            found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            remedy=_install(chip.platform),
        ) from error
    return Topology(name or arguments["topology"], tuple(described.devices))


def _check_compiler(platform: str, packages: Sequence[str]) -> None:
    """Raises UsageError if a package of a platform's compiler is not installed."""
    missing = [name for name in packages if not has_package(name)]
    if missing:
        raise UsageError(
            "not_installed",
            f"the compiler for {platform} is not installed",
            expected=", ".join(packages),
            found=f"no {missing[0]}",
            remedy=_install(platform),
        )


def _install(platform: str) -> str:
    return f"pip install '.[build,{COMPILERS[platform][0]}]' in the checkout"


@contextlib.contextmanager
def _without_chip() -> Iterator[None]:
    """Sets the variables for compilers without a chip that the user has not set, and takes them back."""
    added = {name: value for name, value in _SURROUNDINGS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _tpu(chip: Chip, count: int) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of a TPU's topology."""
    assert chip.topologies is not None
    shape = chip.topologies[count]
    arguments: dict[str, Any] = {}
    sizes = tuple(int(size) for size in shape.split("x"))
    if math.prod(sizes) <= chip.host_chips:
        arguments["chips_per_host_bounds"] = (*sizes, 1)[:3]
    if chip.name == "v4":
        arguments["chip_config_name"] = "megacore"
    return f"{_PREFIXES.get(chip.name, chip.name)}:{shape}", arguments


def _gpu(chip: Chip, count: int) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of the topology of one host's GPUs."""
    assert chip.gpu is not None
    return "", {"topology": f"1x1x{count}", "target_config": _target_config(chip, chip.gpu)}


def _target_config(chip: Chip, gpu: GpuFacts) -> str:
    """XLA's GpuTargetConfigProto as text."""
    major, minor = gpu.capability
    # Kernels for the tensor cores of these are of only one generation: sm_90a, sm_100a.
    accelerated = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    cudnn = importlib.metadata.version("nvidia-cudnn-cu13").split(".")
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          shared_memory_per_block: {48 * 1024}
          shared_memory_per_core: {gpu.shared}
          shared_memory_per_block_optin: {gpu.shared - 1024}
          threads_per_core_limit: {gpu.threads}
          core_count: {gpu.cores}
          fpus_per_core: {gpu.lanes}
          block_dim_limit_x: {2**31 - 1}
          block_dim_limit_y: {2**16 - 1}
          block_dim_limit_z: {2**16 - 1}
          memory_bandwidth: {int(chip.bandwidth)}
          l2_cache_size: {gpu.cache}
          clock_rate_ghz: {gpu.clock}
          device_memory_size: {chip.memory_bytes}
          registers_per_core_limit: {64 * 1024}
          registers_per_block_limit: {64 * 1024}
          cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
        }}
        platform_name: "CUDA"
        runtime_version {{ major: {CUDA} }}
        dnn_version_info {{ major: {cudnn[0]} minor: {cudnn[1]} patch: {cudnn[2]} }}
        device_description_str: "{chip.device_kind}"
    """


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
