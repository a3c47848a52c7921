"""Executables that were compiled on this machine, in the user's cache: a sealed file each.

It holds an entry as JAX's compilation cache does, and its digest: it holds machine code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanrun.artifact.programs import Program
from wanrun.files import canonical_json, read_bounded, replace_file, sealed, sha256_of, unsealed
from wanrun.machine.environment import device_environment

if TYPE_CHECKING:
    import jax

MAX_BYTES = 2**32


def kept_file(
    folder: Path,
    kind: str,
    program: Program,
    options: Mapping[str, Any],
    devices: Sequence[jax.Device],
    *others: str,
) -> Path:
    """Returns the path of a program's executable that was compiled here.

    Args:
        folder: the user's cache of an artifact and a target on this host: see ``entries.overlay_path``.
        kind: ``compiled`` or ``tuned``.
        others: further facts, such as the digest of the executable that it was compared with.
    """
    called = [program.sha256, program.inputs, program.donate, *others]
    facts = [called, dict(options), device_environment(devices)]
    return folder / f"{kind}-{sha256_of(canonical_json(facts))}.executable"


def read_kept(path: Path) -> bytes | None:
    """Returns the entry that a file holds; None without a whole file."""
    try:
        return unsealed(path.name, read_bounded(path, MAX_BYTES))
    except (OSError, ValueError):
        return None


def keep(path: Path, entry: bytes) -> None:
    """Writes an entry. Raises OSError if there is no room, or the folder cannot be written."""
    replace_file(path, sealed(path.name, entry))
