"""The chips of the table by the names that users write, and what to name where a name means none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from wanbuild.targets.chip import Chip
from wanbuild.targets.chips import CHIPS
from wanrun.artifact.target_names import named_target, short_name, split_w8a8

_PLATFORMS: Mapping[str, str] = MappingProxyType({"gpu": "cuda", "nvidia": "cuda"})
"""JAX's names of platforms, where users have another."""


@dataclass(frozen=True)
class ChipName:
    """A chip that a name means, with products of 8 bits if the name says so.

    ``count`` is the number of devices; None where the name has none.
    """

    chip: Chip
    count: int | None

    @property
    def text(self) -> str:
        """The name as the table of chips has it: ``rtx4090-w8a8-2``."""
        return self.chip.name if self.count is None else f"{self.chip.name}-{self.count}"


def chip_named(text: str, chips: Mapping[str, Chip] = CHIPS) -> ChipName | None:
    """Returns the chip and number of devices that a target's name means; None if it means no chip.

    The name is understood as by ``named_target``.
    """
    if (found := named_target(text, chips)) is None:
        return None
    chip = chips[found.chip]
    return ChipName(chip.in_eight_bits() if found.w8a8 else chip, found.count)


def choice(text: str) -> str | None:
    """Returns the remedy for a name that means no chip: names that it is a part of, or of its platform."""
    part = split_w8a8(text.strip().lower())[0]
    kind, short = _PLATFORMS.get(part, part), short_name(part)
    like = [
        name
        for name in CHIPS
        if part[:1].isalnum() and (short in short_name(name) if short else part in name)
    ]
    alike = [chip.name for chip in CHIPS.values() if chip.platform == kind] or like
    return f"name the chip: --target {' or '.join(alike)}" if alike else None
