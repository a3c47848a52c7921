"""The lock file: the pinned revision of each address, so that every run uses the same artifact."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec

import wanrun
from wanrun.errors import UsageError, unwritable

VARIABLE: Final = "WANRUN_LOCK"
"""The environment variable that names the lock file."""

MAX_BYTES: Final = 2**22


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A repository's commit (empty for a URL), and the digest of the manifest, which covers the artifact."""

    revision: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{40})?\Z")]
    manifest_digest: Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]


def lock_file(cache: Path) -> Path:
    """Returns the lock file: that of ``WANRUN_LOCK``, or the user cache's."""
    return Path(os.environ.get(VARIABLE) or cache / "lock.json")


def read_pins(path: Path) -> Mapping[str, Pin]:
    """Returns the pins of a lock file by address, none without a file; raises UsageError for another file."""
    try:
        return msgspec.json.decode(wanrun.read_bounded(path, MAX_BYTES), type=dict[str, Pin])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(
            "unreadable",
            f"{path} is no lock file",
            found=(getattr(error, "strerror", None) or str(error))[:200],
            remedy=f"set {VARIABLE} to another, or remove this one",
        ) from None


def pin(path: Path, address: str, value: Pin) -> None:
    """Writes a pin; those of other addresses stay, even if another process writes one meanwhile.

    Raises UsageError if the file cannot be written, or is not a lock file.
    """
    with held(path):
        pins = dict(read_pins(path))
        if pins.get(address) != value:
            pins[address] = value
            text = msgspec.json.format(msgspec.json.encode(dict(sorted(pins.items()))), indent=2)
            wanrun.replace_file(path, text + b"\n")


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Holds an exclusive lock for writing the lock file, which the system releases if this process is killed.

    Raises UsageError if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.held").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise unwritable(f"the lock file {path}", error, f"set {VARIABLE} to another") from error
