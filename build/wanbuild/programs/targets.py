"""Targets: the kinds of machine that programs are compiled for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from wanbuild.devices import open_exactly
from wanrun.artifact.environment import device_environment, host_environment
from wanrun.artifact.mesh import jax_mesh, name_suffix, num_devices
from wanrun.artifact.programs import Kernels
from wanrun.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class TargetSpec:
    """A target that can be compiled here.

    Args:
        name: its name and folder in the artifact; ``local`` on a CPU host is ``cpu``.
        platform: JAX's platform name.
        kernels: the implementations that its programs use.
        device: the device that programs are lowered for, or the first of the mesh.
        memory_bytes: the device's memory.
        environment: every fact that the executables depend on.
        mesh: devices by axis; empty for one device.
        devices: the devices of the mesh.
    """

    name: str
    platform: str
    kernels: Kernels
    device: jax.Device
    memory_bytes: int
    environment: dict[str, Any]
    mesh: Mapping[str, int] = field(default_factory=dict)
    devices: Sequence[jax.Device] = ()

    def reopened(self) -> TargetSpec:
        """Returns the target with its devices, where JAX may have started anew for another target."""
        return resolve_target(self.name.removesuffix(name_suffix(self.mesh)), self.mesh)

    @property
    def programs_for(self) -> tuple[Kernels, Mapping[str, int], Sequence[jax.Device]]:
        """The last arguments of a ``ProgramBuilder`` for this target."""
        return self.kernels, self.mesh, self.devices

    @property
    def where(self) -> jax.Device | jax.sharding.Mesh:
        """What programs are lowered for."""
        return jax_mesh(self.mesh, self.devices) or self.device


def image_multiple(platform: str, device_kind: str) -> int:
    """Returns the multiple that image tokens are padded to: a TPU's attention works on whole blocks.

    All targets of today are CPUs, which need no padding.

    Args:
        platform: JAX's platform name.
        device_kind: JAX's name of the device, e.g. ``TPU v5p``.
    """
    if platform != "tpu":
        return 1
    return 256 if any(name in device_kind.lower() for name in ("v6", "7x", "v7")) else 128


def resolve_target(name: str, mesh: Mapping[str, int] = MappingProxyType({})) -> TargetSpec:
    """Returns the target of a name, with its devices.

    Args:
        name: 'local' for this machine's default device, or 'cpu'.
        mesh: devices by axis; empty for one device.

    Raises:
        UsageError: for an unknown target, one without a device here, or an accelerator.
    """
    if name not in ("local", "cpu"):
        raise UsageError(f"target {name} is not known", expected="local or cpu", found=name)
    try:
        devices = open_exactly(None if name == "local" else name, num_devices(mesh))
    except ArtifactError as error:
        raise UsageError(
            f"target {name} cannot be compiled here: {error.what}", found=error.found, remedy=error.remedy
        ) from None
    platform = devices[0].platform
    if platform != "cpu":
        raise UsageError(
            f"this machine's accelerator ({devices[0].device_kind}) is not a target yet",
            remedy="use --target cpu",
        )
    count = num_devices(mesh)
    environment = {**host_environment(platform), **device_environment(devices)}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count
    padding = image_multiple(platform, devices[0].device_kind)
    kernels = Kernels("cpu", "winograd", weight_bits=True, image_multiple=padding)
    full_name = f"cpu{name_suffix(mesh)}"
    return TargetSpec(full_name, platform, kernels, devices[0], memory, environment, mesh, devices)
