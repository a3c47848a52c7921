"""Executables that were compiled on this machine, in the user's cache: a sealed file each.

It holds an entry as JAX's compilation cache does, and its digest: it holds machine code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Program
from wanrun.files import canonical_json, read_bounded, replace_file, sealed, sha256_of, unsealed
from wanrun.machine.environment import device_environment, host_environment
from wanrun.user_cache import CacheFolder

if TYPE_CHECKING:
    import jax

MAX_BYTES = 2**32

AUTOTUNING = ("autotun", "triton_gemm")
"""Parts of the names of compiler options that only matter where no chip is present for autotuning."""


def options_here(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a target's compiler options for a compilation on the chip, where kernels can be tuned."""
    return {name: value for name, value in options.items() if not any(part in name for part in AUTOTUNING)}


def overlay_folder(manifest: Manifest, target: str) -> CacheFolder:
    """Returns the user's cache folder of an artifact's programs that were compiled here.

    Each kind of host has its own folder: machines may share a home, and the cache key ignores the CPU model.
    """
    host = sha256_of(canonical_json(host_environment(manifest.targets[target].environment["platform"])))
    digest = manifest.content_digest.removeprefix("sha256:")
    return CacheFolder("executables", f"{digest[:16]}-{target}-{host[:8]}", "compiled programs")


def kept_file(
    folder: Path, program: Program, options: Mapping[str, Any], devices: Sequence[jax.Device]
) -> Path:
    """Returns the path of a program's executable that was compiled here with these options of the compiler.

    ``folder`` is the user's cache of an artifact and a target on this host: ``overlay_folder``.
    """
    called = [program.sha256, program.inputs, program.donate]
    facts = [called, dict(options), device_environment(devices)]
    return folder / f"compiled-{sha256_of(canonical_json(facts))}.executable"


def read_kept(path: Path) -> bytes | None:
    """Returns the entry that a file holds; None without a whole file."""
    try:
        return unsealed(path.name, read_bounded(path, MAX_BYTES))
    except (OSError, ValueError):
        return None


def keep(path: Path, entry: bytes) -> None:
    """Writes an entry. Raises OSError if there is no room, or the folder cannot be written."""
    replace_file(path, sealed(path.name, entry))
