"""Opens the device that a target's executables run on, and checks it before reading any weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wanrun.artifact.mesh import jax_mesh, num_devices
from wanrun.artifact.select import SelectedTarget
from wanrun.errors import Mismatch, UsageError, artifact_mismatch
from wanrun.machine.environment import device_mismatches, open_devices
from wanrun.machine.jax_process import uncollected
from wanrun.timing.timings import Timings

if TYPE_CHECKING:
    import jax

    from wanrun.cluster.process_group import ProcessGroup


@dataclass(frozen=True)
class OpenDevice:
    """The device on which programs run, or the devices of a mesh.

    ``device`` is the first of the mesh that is this process's. ``foreign`` says whether the target's
    executables do not fit the device, so that programs are compiled here. ``mesh`` is None for one device,
    ``group`` for one process.
    """

    device: jax.Device
    foreign: bool
    mesh: jax.sharding.Mesh | None = None
    group: ProcessGroup | None = None

    @property
    def devices(self) -> list[jax.Device]:
        """All devices that programs run on."""
        return [self.device] if self.mesh is None else list(self.mesh.devices.flat)

    @property
    def where(self) -> jax.Device | jax.sharding.Mesh:
        """The device or mesh that programs are lowered for."""
        return self.device if self.mesh is None else self.mesh

    @property
    def whole(self) -> jax.sharding.Sharding:
        """The sharding of an array that every device has whole."""
        import jax

        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(self.device)
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())


def open_device(
    selected: SelectedTarget,
    allow_compile: bool,
    timings: Timings,
    warn: Callable[[str], None],
    group: ProcessGroup | None = None,
    beside: str | None = None,
    imported: Callable[[str], object] = lambda platform: None,
) -> OpenDevice:
    """Imports jax, starts the target's platform and compares the devices with the target's.

    Args:
        allow_compile: whether a device that differs from the target's may be used.
        warn: gets a message when the artifact's executables are not used.
        group: the processes of the run, each with an equal part of the mesh; None for one process.
        beside: another platform that JAX starts too.
        imported: called with the platform once JAX is imported, before its devices start.

    Raises ArtifactError if there is no such device, or listing every fact that differs; UsageError if the
    processes cannot share the mesh.
    """
    count = needed = num_devices(selected.mesh)
    if group is not None:
        from wanrun.cluster.process_group import local_devices

        count = local_devices(selected.mesh, group.num_processes)
    with timings.phase("import", "jax"), uncollected():
        importlib.import_module("jax.export")
    platform = selected.target.environment["platform"]
    imported(platform)
    with timings.phase("device"):
        devices = open_devices(platform, count, alone=group is None, beside=beside)
    mismatches: Sequence[Mismatch] = device_mismatches(selected.target.environment, devices, needed)
    if mismatches and not allow_compile:
        raise artifact_mismatch(f"target {selected.name}", mismatches)
    mesh = jax_mesh(selected.mesh, devices[:needed])
    ours = devices if mesh is None else list(mesh.local_devices)
    if group is not None and len(ours) != count:
        raise UsageError(
            "mismatch",
            "the mesh's devices are not shared evenly by the processes",
            expected=f"{count} in each",
            found=f"{len(ours)} in process {group.process}",
            remedy="start one process per host, and as many as the mesh needs",
        )
    foreign = bool(mismatches or selected.mismatches or selected.refusal)
    if foreign:
        reasons = "; ".join(filter(None, map(str, [*selected.mismatches, *mismatches, selected.refusal])))
        warn(f"the artifact's executables are not used, its programs are compiled here: {reasons}")
    return OpenDevice(ours[0], foreign, mesh, group)
