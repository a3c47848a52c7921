"""The part of gpu.py that loads executables past wanrun's checks: ``python gpu_entries.py entries JSON``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax

from gpu_rows import Rows, main

if TYPE_CHECKING:
    from wanrun.artifact.artifact import Artifact


def entries(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Loads the executables of a target, which may have been built elsewhere, past every check of wanrun.

    A loader that crashes ends this process: the last row names the program.
    """
    from wanrun.artifact.artifact import open_artifact
    from wanrun.machine.environment import open_devices

    artifact = open_artifact(Path(arguments["artifact"]))
    manifest = artifact.manifest
    target = manifest.targets[arguments["target"]]
    device = open_devices(target.environment["platform"])[0]
    built, here = target.environment, device.client.platform_version
    rows.add("built for", note=f"{built['device_kind']}: {built['platform_version']}")
    rows.add("found", note=f"{device.device_kind}: {here}")
    for profile, found in target.executables.items():
        programs = manifest.programs(target, manifest.profiles[profile])
        for name, entry in found.items():
            with rows.attempt(f"load {name}"):
                _load(rows, artifact, target, name, programs[name], entry, device)


def _load(
    rows: Rows, artifact: Artifact, target: Any, name: str, program: Any, entry: Any, device: jax.Device
) -> None:
    """Loads one executable from its bytes.

    Raises:
        ArtifactError: if JAX does not take it.
    """
    from wanrun.executables.jax_hook import load
    from wanrun.executables.lowering import lower

    data, bytes_of = artifact.program(program), artifact.executable(target, entry)
    lowered = lower(data, name, program.donated, device, options=target.options_of(name))
    rows.add(f"load {name}", note="the loader did not return", begun=True)
    started = time.perf_counter()
    load(name, lowered, bytes_of)
    rows.add(f"load {name}", (time.perf_counter() - started) * 1e3, "ms", "loaded")


if __name__ == "__main__":
    main(MappingProxyType({"entries": entries}))
