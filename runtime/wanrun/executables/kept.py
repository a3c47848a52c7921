"""Executables that were compiled on this machine, in the user's cache: an entry and its record each.

An entry has the form of JAX's compilation cache. Its record, which is written last, has its digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from wanrun.artifact.programs import Program
from wanrun.files import canonical_json, read_bounded, replace_file, sha256_of
from wanrun.machine.environment import device_environment

if TYPE_CHECKING:
    import jax

MAX_RECORD_BYTES = 2**16
MAX_ENTRY_BYTES = 2**32


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of an entry.

    Attributes:
        sha256: the entry's digest.
        seconds: of one call, where it was compared with the artifact's executable; else None.
        built_seconds: of one call of the artifact's executable, as for ``seconds``.
    """

    sha256: str
    seconds: float | None = None
    built_seconds: float | None = None


def kept_file(
    folder: Path,
    kind: str,
    program: Program,
    options: Mapping[str, Any],
    devices: Sequence[jax.Device],
    *others: str,
) -> Path:
    """Returns the record's path of a program that was compiled here.

    Args:
        folder: the user's cache of an artifact and a target on this host: see ``entries.overlay_path``.
        kind: ``compiled`` or ``tuned``.
        program: the program.
        options: the compiler's options.
        devices: the devices that it was compiled for.
        others: further facts, such as the digest of the executable that it was compared with.
    """
    called = [program.sha256, program.inputs, program.donate, *others]
    facts = [called, dict(options), device_environment(devices)]
    return folder / f"{kind}-{sha256_of(canonical_json(facts))}.json"


def read_kept(path: Path) -> bytes | None:
    """Returns the entry of a record, checked; None without a record or a whole entry."""
    try:
        record = msgspec.json.decode(read_bounded(path, MAX_RECORD_BYTES), type=Kept)
        entry = read_bounded(_entry(path), MAX_ENTRY_BYTES)
    except (OSError, ValueError, RecursionError):
        return None
    return entry if sha256_of(entry) == record.sha256 else None


def keep(path: Path, entry: bytes, seconds: float | None = None, built_seconds: float | None = None) -> None:
    """Writes an entry, then its record.

    Raises:
        OSError: if there is no room, or the folder cannot be written.
    """
    replace_file(_entry(path), entry)
    replace_file(path, msgspec.json.encode(Kept(sha256_of(entry), seconds, built_seconds)))


def drop(path: Path) -> None:
    """Removes a record and its entry, if they are there."""
    path.unlink(missing_ok=True)
    _entry(path).unlink(missing_ok=True)


def _entry(path: Path) -> Path:
    return path.with_suffix(".executable")
