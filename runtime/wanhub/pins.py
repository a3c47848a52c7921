"""The lock file: which revision of each address is run, so that every run is of the same artifact."""

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
    """What an address stands for.

    Attributes:
        revision: the commit of a repository; empty of a URL.
        manifest_digest: the artifact's, which covers all of it.
    """

    revision: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{40})?\Z")]
    manifest_digest: Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]


def lock_file(cache: Path) -> Path:
    """Returns the lock file: that of ``WANRUN_LOCK``, or the one of the user's cache."""
    return Path(os.environ.get(VARIABLE) or cache / "lock.json")


def read_pins(path: Path) -> Mapping[str, Pin]:
    """Returns the pins of a lock file, by address; none without one.

    Raises:
        UsageError: if it is something else.
    """
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
    """Writes a pin; those of other addresses stay, also if another process writes one meanwhile.

    Raises:
        UsageError: if the file cannot be written, or is something else.
    """
    with held(path):
        pins = dict(read_pins(path))
        if pins.get(address) != value:
            pins[address] = value
            text = msgspec.json.format(msgspec.json.encode(dict(sorted(pins.items()))), indent=2)
            wanrun.replace_file(path, text + b"\n")


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Holds the right to write a lock file; the system gives it back if this process is killed.

    Raises:
        UsageError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.held").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise unwritable(f"the lock file {path}", error, f"set {VARIABLE} to another") from error
