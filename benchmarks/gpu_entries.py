"""The part of gpu.py that loads executables past wanrun's checks: ``python gpu_entries.py entries JSON``."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from gpu_rows import Rows, main


def entries(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Loads the executables of a target, which may have been built elsewhere, past every check of wanrun.

    An entry that is not under the key that JAX asks for here is loaded under that key all the same. A loader
    that crashes ends this process: the last row names the program.
    """
    from wanrun.artifact.manifest import read_manifest
    from wanrun.executables.store import check_entry
    from wanrun.machine.environment import open_devices
    from wanrun.machine.jax_process import JaxFlags

    artifact = Path(arguments["artifact"])
    manifest = read_manifest(artifact)
    target = manifest.targets[arguments["target"]]
    device = open_devices(target.environment["platform"])[0]
    built, here = target.environment, device.client.platform_version
    rows.add("built for", note=f"{built['device_kind']}: {built['platform_version']}")
    rows.add("found", note=f"{device.device_kind}: {here}")
    with JaxFlags(built["platform"]):
        for profile, found in target.executables.items():
            programs = manifest.programs(target, manifest.profiles[profile])
            for name, entry in found.items():
                with rows.attempt(f"load {name}"):
                    check_entry(artifact, target, name, entry)
                    _load(rows, artifact, target, name, programs[name], entry, device)


def _load(
    rows: Rows, artifact: Path, target: Any, name: str, program: Any, entry: Any, device: jax.Device
) -> None:
    """Loads one executable under the key that JAX has for it here.

    Raises:
        LookupError: if JAX does not take it.
    """
    from wanrun.executables.jax_cache import asked_key, cached, lower
    from wanrun.executables.store import read_program
    from wanrun.machine.jax_process import using_cache

    data = read_program(artifact, name, program)
    lowered = lower(data, name, program.donated, device, options=target.options_of(name))
    with tempfile.TemporaryDirectory() as folder:
        with using_cache(Path(folder), write=False):
            key = asked_key(lowered)
        if key is None:
            raise LookupError("JAX does not say under which key it looks for the entry")
        same = "the same key" if key == entry.file else "another key"
        rows.add(f"load {name}", note=f"{same}; the loader did not return", begun=True)
        Path(folder, key).write_bytes((artifact / target.folder / entry.file).read_bytes())
        started = time.perf_counter()
        with using_cache(Path(folder), write=False):
            loaded = cached(lowered)
        if loaded is None:
            raise LookupError(f"{same}, and JAX does not take the entry")
        rows.add(f"load {name}", (time.perf_counter() - started) * 1e3, "ms", f"{same}; loaded")


if __name__ == "__main__":
    main(MappingProxyType({"entries": entries}))
