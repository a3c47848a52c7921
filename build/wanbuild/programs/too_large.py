"""A program that a target's memory cannot hold: finds its size in XLA's message, and makes the error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from wanrun.artifact.programs import Profile
from wanrun.errors import UsageError

if TYPE_CHECKING:
    from wanbuild.targets.target import TargetSpec

_NEEDED = re.compile(r"[Uu]sed ([\d.]+)([KMG]) of|temporaries \(([\d.]+)([KMG])\) exceeds")
"""The message of a TPU's compiler about a program that is too large."""

_UNITS: Mapping[str, int] = MappingProxyType({"K": 2**10, "M": 2**20, "G": 2**30})


class TooLargeError(UsageError):
    """A program does not fit the memory of a target's device, on which it needs ``nbytes``.

    ``profile`` is the profile that it belongs to; None until it is known.
    """

    def __init__(self, program: str, target: TargetSpec, nbytes: int) -> None:
        self.target = target
        self.profile: Profile | None = None
        super().__init__(
            "too_large",
            f"{program} does not fit the memory of target {target.name}",
            expected=f"at most {target.memory_bytes / 1e9:.2f} GB",
            found=f"{nbytes / 1e9:.2f} GB, {(nbytes - target.memory_bytes) / 1e9:.2f} GB too much",
            remedy="build a smaller size, fewer frames or fewer videos",
        )


def refused_bytes(error: Exception) -> int | None:
    """Returns how many bytes a program needs that the compiler refuses; None for another failure."""
    text = str(error)
    found = _NEEDED.search(text) if "RESOURCE_EXHAUSTED" in text else None
    if found is None:
        return None
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return int(float(number) * _UNITS[unit])
