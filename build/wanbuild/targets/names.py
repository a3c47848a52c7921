"""Names of targets as users write them: a chip, whether products are of 8 bits, and how many devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from wanbuild.targets.chip import W8A8, Chip
from wanbuild.targets.chips import CHIPS

_LEFT_OUT = re.compile(r"nvidia|geforce|rtx|tpu|[\s_-]+")
"""What a name may have or lack: its vendor, its family, and what stands between words."""

_PLATFORMS: Mapping[str, str] = MappingProxyType({"gpu": "cuda", "nvidia": "cuda"})
"""JAX's names of platforms, where users have another."""

_MEMORY = re.compile(r"-\d+gb$")
"""The memory in a chip's name."""

_COUNT = re.compile(r"(.*\S)[\s_-]+(0|[1-9]\d{0,99})")


@dataclass(frozen=True)
class ChipName:
    """A chip that a name means.

    Args:
        chip: the chip, with products of 8 bits if the name says so.
        count: the number of devices; None where the name has none.
    """

    chip: Chip
    count: int | None

    @property
    def text(self) -> str:
        """The name as the table of chips has it: ``rtx4090-w8a8-2``."""
        return self.chip.name if self.count is None else f"{self.chip.name}-{self.count}"


def split_w8a8(name: str) -> tuple[str, bool]:
    """Returns a target's name without ``W8A8``, and whether it ended in it, but for a number of devices."""
    end, dash, count = name.rpartition("-")
    if dash and count.isdecimal() and end.endswith(W8A8):
        return f"{end.removesuffix(W8A8)}-{count}", True
    return name.removesuffix(W8A8), name.endswith(W8A8)


def chip_named(text: str, chips: Mapping[str, Chip] = CHIPS) -> ChipName | None:
    """Returns the chip that a target's name means: ``v7x-w8a8-8``, ``RTX 4090``, ``5090``, ``nvidia-h100-8``.

    A name may lack vendor, family and memory, and have capitals, spaces and dashes of its own; all else has
    to be there, since an RTX 4070 is no RTX 4070 Ti.

    Args:
        text: the name.
        chips: the known chips.

    Returns:
        the chip and the number of devices; None for another target, and for what means no chip.
    """
    plain, w8a8 = split_w8a8(text.strip().lower())
    counted = _COUNT.fullmatch(plain)
    ways: list[tuple[str, int | None]] = [(plain, None)]
    if counted:
        ways.insert(0 if counted[1] in chips else 1, (counted[1], int(counted[2])))
    for name, count in ways if plain == plain.strip("-") else ():
        chip = chips.get(name) or next((one for one in chips.values() if _short(name) in _shorts(one)), None)
        if chip is not None:
            return ChipName(chip.in_eight_bits() if w8a8 else chip, count)
    return None


def choice(text: str) -> str | None:
    """Returns the remedy for a name of no chip: those that it is a part of, or that its platform has."""
    part = split_w8a8(text.strip().lower())[0]
    kind, short = _PLATFORMS.get(part, part), _short(part)
    like = [
        name for name in CHIPS if part[:1].isalnum() and (short in _short(name) if short else part in name)
    ]
    alike = [chip.name for chip in CHIPS.values() if chip.platform == kind] or like
    return f"name the chip: --target {' or '.join(alike)}" if alike else None


def _short(name: str) -> str:
    return _LEFT_OUT.sub("", name)


def _shorts(chip: Chip) -> set[str]:
    return {_short(chip.name), _short(_MEMORY.sub("", chip.name))}
