"""The facts that executables depend on: recorded by the build, checked by the runtime before any weight."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from wanrun.artifact.address_space import check_address_space
from wanrun.artifact.jax_process import JaxFlags
from wanrun.errors import ArtifactError, Mismatch, UsageError

if TYPE_CHECKING:
    import jax

KEY_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""The environment variables in the compilation cache's key."""

DEVICE_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "device_kind": "run on that device, or wanbuild compile --target local here",
        "device_count": "make as many devices visible as the target was built for",
        "platform_version": "install the jaxlib and driver that the target was built with",
    }
)
"""The facts about devices, with the remedy for a mismatch of each."""

ENVIRONMENT_FACTS: Mapping[str, type] = MappingProxyType(
    {
        "platform": str,
        "machine": str,
        "packages": dict,
        "variables": dict,
        "zstandard": bool,
        "device_kind": str,
        "device_count": int,
        "platform_version": str,
    }
)
"""The facts in every target's environment, with their types; a CPU target also has cpu_features."""

CPU_FEATURE_PREFIXES = ("avx", "amx", "sse", "fma", "bmi", "f16c", "aes", "pclmul", "popcnt", "sha", "gfni")
CPU_FEATURE_NAMES = frozenset(
    {"adx", "movbe", "vaes", "vpclmulqdq", "lzcnt", "abm", "rdseed", "asimd", "sve"}
)


def cpu_features() -> tuple[str, ...]:
    """Returns the instruction-set features of this CPU, from /proc/cpuinfo; empty if there is no such file.

    Executables for CPUs use the build host's features, but the device kind is only "cpu". An executable with
    an instruction that the CPU lacks would end the process with SIGILL.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            features = value.split()
            return tuple(
                sorted(
                    feature
                    for feature in set(features)
                    if feature.startswith(CPU_FEATURE_PREFIXES)
                    or feature in CPU_FEATURE_NAMES
                    or name.strip() == "Features"
                )
            )
    return ()


def usable_cores() -> int:
    """Returns the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def package_versions() -> dict[str, str]:
    """Returns the versions of the packages in the cache's key."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    for name in ("libtpu", "jax-cuda13-pjrt", "jax-cuda12-pjrt"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def host_environment(platform_name: str) -> dict[str, Any]:
    """Returns the facts that are known without importing jax."""
    facts: dict[str, Any] = {
        "platform": platform_name,
        "machine": platform.machine(),
        "packages": package_versions(),
        "variables": {name: os.environ.get(name, "") for name in KEY_VARIABLES},
        "zstandard": _has_package("zstandard"),
    }
    if platform_name == "cpu":
        facts["cpu_features"] = list(cpu_features())
    return facts


def _has_package(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def check_environment(environment: Mapping[str, Any]) -> None:
    """Raises ValueError unless a target's recorded environment has every fact with the right type."""
    for name, kind in ENVIRONMENT_FACTS.items():
        if not isinstance(environment.get(name), kind):
            raise ValueError(f"{name} of a target's environment is {environment.get(name)!r}")
    features = environment.get("cpu_features", [])
    if not isinstance(features, list) or any(not isinstance(feature, str) for feature in features):
        raise ValueError(f"cpu_features of a target's environment is {features!r}")


def device_environment(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Returns the facts about the devices of a platform, all that JAX sees: they are in the cache's key."""
    first = devices[0]
    return {
        "device_kind": first.device_kind,
        "device_count": len(devices),
        "platform_version": first.client.platform_version,
    }


def host_mismatches(built: Mapping[str, Any], requirements: Path) -> list[Mismatch]:
    """Compares a target's environment with this host, without importing jax.

    Args:
        built: the target's environment.
        requirements: its requirements file, for the remedy.

    Returns:
        A mismatch for each fact that differs.
    """
    found = host_environment(built["platform"])
    install = f"pip install -r {shlex.quote(str(requirements))}"
    mismatches: list[Mismatch] = []
    if built["machine"] != found["machine"]:
        mismatches.append(
            Mismatch(
                "machine", built["machine"], found["machine"], "compile a target on this kind of machine"
            )
        )
    for name in sorted(built["packages"].keys() | found["packages"].keys()):
        expected, actual = built["packages"].get(name), found["packages"].get(name)
        if expected != actual:
            command = install if expected else f"pip uninstall {name}"
            mismatches.append(
                Mismatch(f"package {name}", expected, actual, f"{command}, or run wanbuild compile")
            )
    for name, expected in built["variables"].items():
        actual = found["variables"].get(name, "")
        if actual != expected:
            mismatches.append(
                Mismatch(f"variable {name}", repr(expected), repr(actual), "set it as it was at build time")
            )
    if arguments := xla_arguments():
        mismatches.append(
            Mismatch("this process's arguments", "none for XLA", " ".join(arguments), "leave them out")
        )
    if built["zstandard"] != found["zstandard"]:
        command = install if built["zstandard"] else "pip uninstall zstandard"
        mismatches.append(Mismatch("package zstandard", built["zstandard"], found["zstandard"], command))
    missing = sorted(set(built.get("cpu_features", ())) - set(found.get("cpu_features", ())))
    if missing:
        mismatches.append(
            Mismatch(
                "CPU features", " ".join(missing), "a CPU without them", "run wanbuild compile on this CPU"
            )
        )
    return mismatches


def device_mismatches(built: Mapping[str, Any], devices: Sequence[jax.Device]) -> list[Mismatch]:
    """Compares a target's environment with the devices, and returns a mismatch for each fact that differs."""
    found = device_environment(devices)
    return [
        Mismatch(name.replace("_", " "), built[name], found[name], remedy)
        for name, remedy in DEVICE_REMEDIES.items()
        if built[name] != found[name]
    ]


def forced_cpu_devices() -> int:
    """Returns the number of CPU devices that XLA's flags ask for; one without such a flag."""
    flags = os.environ.get("XLA_FLAGS", "")
    count = re.search(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(count[1]) if count else 1


def unusable_devices(built: Mapping[str, Any]) -> list[Mismatch]:
    """Returns the mismatches of devices, for an error that lists those of the host too.

    XLA ends the process if it does not know a flag. So if the flags differ from those of the build, XLA is
    not started, and only the number of CPU devices that the flags ask for is compared.
    """
    platform_name = built["platform"]
    if any(os.environ.get(name, "") != value for name, value in built["variables"].items()):
        found = forced_cpu_devices()
        if platform_name != "cpu" or found == built["device_count"]:
            return []
        return [Mismatch("device count", built["device_count"], found, DEVICE_REMEDIES["device_count"])]
    try:
        return device_mismatches(built, open_devices(platform_name))
    except ArtifactError as error:
        return [Mismatch("platform", platform_name, error.found, str(error.remedy))]


@contextlib.contextmanager
def importing_jax() -> Iterator[None]:
    """Explains a failed import of JAX, which reads its variables of the environment meanwhile.

    Raises:
        UsageError: if JAX does not take one of them.
        WanError: if the limit of the address space is too low for JAX.
    """
    if "jax" not in sys.modules:
        check_address_space(usable_cores())
    try:
        yield
    except ValueError as error:
        text = str(error).lower()
        given = [
            f"{name}={value!r}"
            for name, value in sorted(os.environ.items())
            if name.startswith("JAX") or (len(name) > 3 and name.lower() in text)
        ]
        # Python takes a module away whose import has failed.
        if "jax" in sys.modules or not given or not _raised_by(error, "jax"):
            raise
        raise UsageError(
            "JAX does not take a variable of the environment",
            expected="a value of its kind",
            found=f"{error}, with {', '.join(given)}",
            remedy="unset it",
        ) from None


def _raised_by(error: BaseException, package: str) -> bool:
    """Whether a module of a package raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return bool(name.partition(".")[0] == package)


def open_devices(platform_name: str | None = None, count: int = 1, alone: bool = True) -> list[jax.Device]:
    """Returns the devices of a platform; JAX starts the platform with the flags of ``JaxFlags``.

    Args:
        platform_name: 'cpu', 'cuda' or 'tpu'; None for the platform that JAX prefers, with its own flags.
        count: devices that are needed in this process. A CPU has as many as JAX is told of before it starts.
        alone: whether this process's devices are all. Else the other processes' are returned too, in the
            order of the processes, and a CPU has exactly ``count`` in each.

    Raises:
        ArtifactError: if JAX cannot start the platform, or another one that JAX_PLATFORMS names.
    """
    try:
        with importing_jax():
            import jax

        with JaxFlags(platform_name) if platform_name is not None else contextlib.nullcontext():
            if (count > 1 or not alone) and platform_name in (None, "cpu"):
                with contextlib.suppress(RuntimeError):  # JAX has started, and has what it has
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
            remedy = f"unset JAX_PLATFORMS, or set it to {platform_name or 'cpu'}"
        raise ArtifactError(f"there is no {kind}", found=reason or "none", remedy=remedy) from None


def xla_arguments() -> list[str]:
    """Returns the arguments of this process that XLA reads as flags; they are in the cache's key."""
    return [argument for argument in sys.argv[1:] if argument.startswith("--xla")]
