"""The facts that executables depend on: recorded by the build, checked by the runtime before any weight."""

from __future__ import annotations

__all__ = ["built_elsewhere", "usable_cores"]

import contextlib
import importlib.metadata
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from wanrun.errors import ArtifactError, Mismatch
from wanrun.machine.attached import ROOT, WORDS, attached
from wanrun.machine.cpu import cpu_features, highest_cpu_level
from wanrun.machine.jax_process import starting

if TYPE_CHECKING:
    import jax

COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""The environment variables that change what is compiled, and how some compilers run it."""

DEVICE_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "device_kind": "run on that device, or wanbuild compile --target local here",
        "device_count": "make as many devices visible as the target was built for",
        "platform_version": "install the jaxlib and driver that the target was built with",
    }
)
"""The facts about devices, with the remedy for a mismatch of each."""

COMPILERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"tpu": ("libtpu",), "cuda": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}
)
"""The packages that compile for a platform."""


def usable_cores() -> int:
    """Returns the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def package_versions(platform_name: str) -> dict[str, str]:
    """Returns the versions of the packages that compile and load executables."""
    compilers = filter(has_package, COMPILERS.get(platform_name, ()))
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", *compilers)}


def host_environment(platform_name: str) -> dict[str, Any]:
    """Returns the facts that are known without importing jax."""
    facts: dict[str, Any] = {
        "platform": platform_name,
        "machine": platform.machine(),
        "packages": package_versions(platform_name),
        "variables": {name: os.environ.get(name, "") for name in COMPILER_VARIABLES},
        "zstandard": has_package("zstandard"),
    }
    if platform_name == "cpu":
        facts["cpu_features"] = list(cpu_features())
    return facts


def has_package(name: str) -> bool:
    """Whether a package is installed."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def built_elsewhere(environment: Mapping[str, Any]) -> bool:
    """Whether a target was built without its chip, so that its executables have never run."""
    return "topology" in environment


def device_kinds(environment: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns JAX's names of the devices that a target was built for; a native one has one."""
    return tuple(dict.fromkeys([environment["device_kind"], *environment.get("device_kinds", ())]))


def device_environment(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Returns the facts about the devices of a platform, all that JAX sees."""
    first = devices[0]
    return {
        "device_kind": first.device_kind,
        "device_count": len(devices),
        "platform_version": first.client.platform_version,
    }


def _no_chip(built: Mapping[str, Any], needed: int, root: Path) -> Mismatch | None:
    """Returns the mismatch of the accelerators that the system shows: none, others, or too few."""
    there, word = attached(built["platform"], root), WORDS.get(built["platform"], built["platform"])
    if there is None:
        return Mismatch("platform", built["platform"], f"no {word}", "run on a machine that has one")
    kinds = device_kinds(built)
    if there.kinds and not set(there.kinds) & set(kinds):
        return Mismatch("device kind", kinds[0], ", ".join(there.kinds), DEVICE_REMEDIES["device_kind"])
    if there.devices is not None and there.devices < needed and built_elsewhere(built):
        remedy = DEVICE_REMEDIES["device_count"]
        return Mismatch("device count", f"at least {needed}", there.devices, remedy)
    return None


def host_mismatches(
    built: Mapping[str, Any], requirements: Path, needed: int = 1, root: Path = ROOT
) -> list[Mismatch]:
    """Compares a target's environment with this host, without importing jax.

    Returns a mismatch for each fact that differs; only one for another chip, none, or fewer than the
    ``needed`` devices of its mesh. A remedy names ``requirements``, its requirements file.
    """
    if (other := _no_chip(built, needed, root)) is not None:
        return [other]
    found, mismatches = host_environment(built["platform"]), list[Mismatch]()
    install = f"pip install -r {shlex.quote(str(requirements))}"

    def compare(what: str, expected: object, here: object, remedy: str) -> None:
        if here != expected:
            mismatches.append(Mismatch(what, expected, here, remedy))

    if not built_elsewhere(built):  # code for a chip is the same whatever the host's CPU is
        compare("machine", built["machine"], found["machine"], "compile a target on this kind of machine")
    compared = {"jax", "jaxlib", *COMPILERS.get(built["platform"], ())}
    for name in sorted(compared & (built["packages"].keys() | found["packages"].keys())):
        expected = built["packages"].get(name)
        remedy = f"{install if expected else f'pip uninstall {name}'}, or run wanbuild compile"
        compare(f"package {name}", expected, found["packages"].get(name), remedy)
    for name, expected in built["variables"].items():
        here = repr(found["variables"].get(name, ""))
        compare(f"variable {name}", repr(expected), here, "set it as it was at build time")
    if built["zstandard"]:  # which entries are compressed with
        compare("package zstandard", True, found["zstandard"], install)
    missing = sorted(set(built.get("cpu_features", ())) - set(found.get("cpu_features", ())))
    if missing:
        remedy = "run wanbuild compile on this CPU"
        if (level := highest_cpu_level(found.get("cpu_features", ()))) is not None:
            remedy += f", or with --target {level} on another CPU of that level"
        mismatches.append(Mismatch("CPU features", " ".join(missing), "a CPU without them", remedy))
    return mismatches


def device_mismatches(
    built: Mapping[str, Any], devices: Sequence[jax.Device], needed: int = 1
) -> list[Mismatch]:
    """Compares a target's environment with all devices that JAX sees; returns a mismatch for each difference.

    JAX's names of the device are compared, and whether there are as many as ``needed`` by its mesh. For a
    target that was compiled on its device, the compiler's text about itself must be the same; without a
    device it says another one.
    """
    found, kinds = device_environment(devices), device_kinds(built)
    wrong = [("device_kind", " or ".join(kinds))] if found["device_kind"] not in kinds else []
    wrong += [("device_count", f"at least {needed}")] if found["device_count"] < needed else []
    if not built_elsewhere(built) and found["platform_version"] != built["platform_version"]:
        wrong.append(("platform_version", built["platform_version"]))
    return [
        Mismatch(name.replace("_", " "), expected, found[name], DEVICE_REMEDIES[name])
        for name, expected in wrong
    ]


def open_devices(
    platform_name: str | None = None, count: int = 1, alone: bool = True, beside: str | None = None
) -> list[jax.Device]:
    """Returns the devices of a platform, which JAX starts, and no other, once in a process.

    Args:
        platform_name: 'cpu', 'cuda' or 'tpu'; None for the platform that JAX prefers.
        count: devices that are needed in this process. On a CPU JAX makes as many, if it has not started yet.
        alone: whether this process's devices are all. Else the other processes' are returned too, in the
            order of the processes, and a CPU has exactly ``count`` in each.
        beside: another platform that JAX starts too.

    Raises UsageError in a fork of a process that has used JAX; ArtifactError if JAX cannot start the
    platform, or another one that JAX_PLATFORMS names.
    """
    try:
        import jax

        platforms = [name for name in (platform_name, beside) if name is not None]
        with starting(*platforms) if platforms else contextlib.nullcontext():
            if (count > 1 or not alone) and platform_name in (None, "cpu"):
                with contextlib.suppress(RuntimeError):  # too late: JAX has started
                    jax.config.update("jax_num_cpu_devices", count)
            return jax.devices(platform_name)
    # jax also raises RuntimeError for a jaxlib of another version. AssertionError means that no platform was
    # started: without a GPU jax skips CUDA silently.
    except (RuntimeError, AssertionError) as error:
        kind = f"{platform_name} device" if platform_name else "device that JAX may use"
        reason = str(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".")
        remedy = "run where there is one, or compile a target for this machine"
        if named := os.environ.get("JAX_PLATFORMS"):
            reason = ", ".join(filter(None, [f"JAX_PLATFORMS={named!r}", reason]))
            asked = platform_name or "cpu"
            remedy = f"unset JAX_PLATFORMS, or set it to {'cpu' if asked in named.split(',') else asked}"
        raise ArtifactError(
            "wrong_machine", f"there is no {kind}", found=reason or "none", remedy=remedy
        ) from None
