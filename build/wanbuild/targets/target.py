"""A target: the machine that programs are compiled for, with its devices, attached or not."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from wanbuild.targets.chip import CUDNN, Chip
from wanbuild.targets.chips import CHIPS
from wanbuild.targets.cpu_levels import CPU_LEVELS, CpuLevel
from wanbuild.targets.parsing import chip_named, choice
from wanbuild.targets.topology import open_exactly, open_topology
from wanrun.artifact.mesh import jax_mesh, mesh_text, name_suffix, num_devices
from wanrun.artifact.programs import Kernels
from wanrun.artifact.target_names import W8A8, split_w8a8
from wanrun.artifact.targets import Option
from wanrun.errors import ArtifactError, UsageError, shortened
from wanrun.machine.attached import ROOT, attached
from wanrun.machine.environment import device_environment, host_environment

if TYPE_CHECKING:
    import jax

MOSAIC = "mosaic"
"""The attention that is compiled for an NVIDIA GPU without one; some chips have it, each in its own form."""

ATTACHED = "-local"
"""The end of the name of a target that was compiled on its own accelerator."""

CPU = Kernels("cpu", "winograd", weight_bits=True, image_multiple=1)
"""Kernels of a CPU that multiplies bfloat16."""

PLAIN_CPU = Kernels("cpu", "winograd", weight_bits=True, image_multiple=1, products="widened")
"""Kernels of an x86-64 CPU that does not."""


@dataclass(frozen=True)
class TargetSpec:
    """A target that can be compiled here.

    Args:
        name: its name and folder in the artifact; ``local`` on a CPU host is ``cpu``.
        device: the device that programs are lowered for, or the first of the mesh.
        memory_bytes: the device's memory.
        environment: every fact that the executables depend on.
        mesh: devices by axis; empty for one device.
        options: the compiler's options.
        program_options: further ones by program.
        cpu_level: the CPU level; None for one CPU's own target, and for chips.
        mosaic: fields of the kernels with the attention in Mosaic GPU; empty where the chip has none.
    """

    name: str
    platform: str
    kernels: Kernels
    device: jax.Device
    memory_bytes: int
    environment: dict[str, Any]
    mesh: Mapping[str, int] = field(default_factory=dict)
    devices: Sequence[jax.Device] = ()
    options: Mapping[str, Option] = field(default_factory=dict)
    program_options: Mapping[str, Mapping[str, Option]] = field(default_factory=dict)
    cpu_level: CpuLevel | None = None
    mosaic: Mapping[str, Any] = field(default_factory=dict)

    def options_of(self, program: str) -> dict[str, Option]:
        """The compiler's options for a program."""
        return {**self.options, **self.program_options.get(program, {})}

    def in_eight_bits(self) -> TargetSpec:
        """Returns the target whose layers of 8-bit weights multiply in 8 bits."""
        suffix = name_suffix(self.mesh)
        name = f"{self.name.removesuffix(suffix)}{W8A8}{suffix}"
        return replace(self, name=name, kernels=msgspec.structs.replace(self.kernels, w8a8=True))

    @property
    def attentions(self) -> dict[str, Kernels]:
        """Its kernels by the name of the attention that its programs can have, its own first."""
        more = {MOSAIC: msgspec.structs.replace(self.kernels, **self.mosaic)} if self.mosaic else {}
        return {self.kernels.attention: self.kernels} | more

    def attending_by(self, attention: str) -> TargetSpec:
        """Returns the target with one of the ``attentions``; raises UsageError for another form."""
        if (kernels := self.attentions.get(attention)) is None:
            raise UsageError(
                "unknown_name",
                f"target {self.name} has no attention {attention}",
                expected=" or ".join(self.attentions),
                found=attention,
                remedy="leave --attention out",
            )
        return self if kernels == self.kernels else replace(self, kernels=kernels)

    @property
    def programs_for(self) -> tuple[Kernels, Mapping[str, int], Sequence[jax.Device]]:
        """The last arguments of a ``ProgramBuilder`` for this target."""
        return self.kernels, self.mesh, self.devices

    @property
    def where(self) -> jax.Device | jax.sharding.Mesh:
        """The device or the mesh that programs are lowered for."""
        return jax_mesh(self.mesh, self.devices) or self.device


def resolve_target(name: str, mesh: Mapping[str, int] = MappingProxyType({})) -> TargetSpec:
    """Returns the target of a name, with its devices.

    The name is 'local' for this machine's default device, 'cpu', a CPU level of ``CPU_LEVELS``, or a chip, as
    ``chip_named`` understands it, which need not be attached; with the mesh's number of devices after it or
    without, 'v7x-8'. With ``W8A8``, layers of 8-bit weights multiply in 8 bits. ``mesh`` has devices by axis,
    and is empty for one device.

    Raises UsageError for an unknown target, one without a device here, a topology that does not exist, or a
    compiler that is not installed.
    """
    named = chip_named(name)
    plain, w8a8 = split_w8a8(name if named is None else named.text)
    if w8a8:
        return resolve_target(plain, mesh).in_eight_bits()
    if named is not None:
        if named.count not in (None, num_devices(mesh)):
            raise UsageError(
                "mismatch",
                f"target {named.text} and its mesh have different numbers of devices",
                expected=f"--mesh with {named.count} in all",
                found=mesh_text(mesh),
                remedy=f"wanbuild plan --target {named.text} finds the fastest mesh",
            )
        return _elsewhere(named.chip, mesh)
    if name.endswith(ATTACHED):
        here = resolve_target("local", mesh)
        if here.name.removesuffix(name_suffix(mesh)) != name:
            raise UsageError(
                "unsupported", f"target {name} cannot be compiled here", expected=name, found=here.name
            )
        return here
    level = CPU_LEVELS.get(name)
    if level is not None:
        level.check_host()
    elif name not in ("local", "cpu"):
        known = ", ".join(["local", "cpu", *CPU_LEVELS, *CHIPS])
        shown = shortened(name)[1:-1]
        raise UsageError(
            "unknown_name",
            f"target {shown} is not known",
            expected=f"one of {known}",
            found=shown,
            remedy=choice(name),
        )
    platform = attached_platform() if name == "local" else "cpu"
    try:
        devices = open_exactly(platform, num_devices(mesh))
    except ArtifactError as error:
        raise UsageError(
            error.code,
            f"target {name} cannot be compiled here: {error.what}",
            found=error.found,
            remedy=error.remedy,
        ) from None
    environment = {**host_environment(platform), **device_environment(devices)}
    if platform != "cpu":
        return _attached(environment, mesh, devices)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_devices(mesh)
    if level is not None:
        environment |= {"cpu_features": list(level.features), "cpu_level": level.name}
    full_name = f"{'cpu' if level is None else level.name}{name_suffix(mesh)}"
    kernels = _cpu_kernels(environment)
    return TargetSpec(
        full_name, platform, kernels, devices[0], memory, environment, mesh, devices, cpu_level=level
    )


def multiplies_bfloat16(features: Iterable[str]) -> bool:
    """Whether an x86-64 CPU with these features has instructions for products of bfloat16."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(features)


def _cpu_kernels(environment: Mapping[str, Any]) -> Kernels:
    """Returns the kernels of a CPU with the features of an environment."""
    native = environment["machine"] != "x86_64" or multiplies_bfloat16(environment["cpu_features"])
    return CPU if native else PLAIN_CPU


def attached_platform(root: Path = ROOT) -> str:
    """Returns the platform that programs for this machine are compiled for.

    It is what JAX_PLATFORMS says, or that of an attached accelerator. JAX itself would start every compiler
    that is installed, with or without an accelerator. ``root`` is the root of the system's files.
    """
    if named := os.environ.get("JAX_PLATFORMS", "").partition(",")[0]:
        return "cuda" if named == "gpu" else named
    return next((name for name in ("cuda", "tpu") if attached(name, root) is not None), "cpu")


def platforms_of(names: Iterable[str]) -> str:
    """Returns the platforms that JAX has to start for targets of these names, with commas between them."""
    attached = attached_platform() if any("local" in name.split("-") for name in names) else "cpu"
    return "cpu" if attached == "cpu" else f"{attached},cpu"


def _attached(
    environment: dict[str, Any], mesh: Mapping[str, int], devices: Sequence[jax.Device]
) -> TargetSpec:
    """Returns the target of this machine's accelerator, whose compiler may try its kernels on it."""
    first = devices[0]
    chip = next((chip for chip in CHIPS.values() if first.device_kind in chip.device_kinds), None)
    platform = environment["platform"]
    if chip is None and platform == "tpu":
        raise UsageError(
            "wrong_machine",
            f"this machine's accelerator ({first.device_kind}) is not a target yet",
            expected="one of " + ", ".join(kind for chip in CHIPS.values() for kind in chip.device_kinds),
            remedy="use --target cpu",
        )
    name = chip.name if chip is not None else "gpu"
    limit = (first.memory_stats() or {}).get("bytes_limit", 0)
    return TargetSpec(
        f"{name}{ATTACHED}{name_suffix(mesh)}",
        platform,
        chip.kernels if chip is not None else CUDNN,
        first,
        limit or (chip.memory_bytes if chip is not None else 0),
        environment,
        mesh,
        devices,
        mosaic={} if chip is None else chip.mosaic,
    )


def _elsewhere(chip: Chip, mesh: Mapping[str, int]) -> TargetSpec:
    """Returns the target of a chip that is not attached."""
    topology = open_topology(chip, num_devices(mesh))
    devices = topology.devices
    environment = {
        **host_environment(chip.platform),
        **device_environment(devices),
        "topology": topology.name,
        "device_kinds": chip.device_kinds,
    }
    return TargetSpec(
        f"{chip.name}{name_suffix(mesh)}",
        chip.platform,
        chip.kernels,
        devices[0],
        chip.memory_bytes,
        environment,
        mesh,
        devices,
        dict(chip.options),
        {name: dict(options) for name, options in chip.program_options.items()},
        mosaic=chip.mosaic,
    )
