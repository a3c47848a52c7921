"""Parses chips and meshes as users write them, and suggests chips for a name that means none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from wanbuild.targets.chip import Chip
from wanbuild.targets.chips import CHIPS
from wanrun.artifact.mesh import AXES, MAX_DEVICES, normal
from wanrun.artifact.target_names import named_target, short_name, split_w8a8
from wanrun.errors import UsageError, shortened

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


USES: Mapping[str, str] = MappingProxyType(
    {
        "data": "the guidance pair, then videos",
        "ring": "the sequence, with keys that go round",
        "fsdp": "the sequence, and parameters that are gathered layer by layer",
        "context": "the sequence, with heads that are exchanged",
        "tensor": "heads and feed-forward",
    }
)
"""What the devices along each axis share, for the help."""


def parse_mesh(text: str) -> dict[str, int]:
    """Parses ``data=2,context=4``; axes of one device are left out.

    Raises UsageError for an unknown axis, one that is named twice, or a size that is not a positive number.
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if text.strip() else ():
        axis, _, size = part.strip().partition("=")
        if axis not in AXES:
            raise UsageError(
                "unknown_name",
                "there is no such axis",
                expected=f"one of {', '.join(AXES)}",
                found=shortened(axis),
            )
        if axis in sizes:
            raise UsageError("conflict", f"{axis} is given twice", found=shortened(text))
        if not (size.isascii() and size.isdigit() and 1 <= int(size[:9]) <= MAX_DEVICES):
            raise UsageError(
                "missing_parameter",
                f"there is no number of devices for {axis}",
                expected=f"{axis}=2",
                found=shortened(part),
            )
        sizes[axis] = int(size)
    return normal(sizes)
