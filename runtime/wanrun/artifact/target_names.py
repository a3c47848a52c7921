"""Names of targets as users write them: a chip, whether products are of 8 bits, and how many devices.

One rule for all commands. The chips are the caller's: those of the table that ``wanbuild`` has, or those that
an artifact has targets for.
"""

from __future__ import annotations

__all__ = ["W8A8", "named_target", "short_name", "split_w8a8"]

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from wanrun.artifact.mesh import Sizes, name_suffix, num_devices

W8A8 = "-w8a8"
"""The end of the name of a target whose layers of 8-bit weights multiply with activations of 8 bits."""

_LEFT_OUT = re.compile(r"nvidia|geforce|rtx|tpu|[\s_-]+")
"""The parts that a name may have or lack: its vendor, its family, and what stands between words."""

_MEMORY = re.compile(r"-\d+gb$")
"""The memory in a chip's name."""

_COUNT = re.compile(r"(.*\S)[\s_-]+(0|[1-9]\d{0,99})")


@dataclass(frozen=True)
class TargetName:
    """The meaning of a target's name: a chip, whether products are of 8 bits, and how many devices.

    ``count`` is None if the name does not say.
    """

    chip: str
    w8a8: bool = False
    count: int | None = None

    @property
    def text(self) -> str:
        """The name as tables and artifacts have it: ``rtx4090-w8a8-2``."""
        plain = f"{self.chip}{W8A8}" if self.w8a8 else self.chip
        return plain if self.count is None else f"{plain}-{self.count}"


def split_w8a8(name: str) -> tuple[str, bool]:
    """Returns a target's name without ``W8A8``, and whether it ended in it, but for a number of devices."""
    end, dash, count = name.rpartition("-")
    if dash and count.isdecimal() and end.endswith(W8A8):
        return f"{end.removesuffix(W8A8)}-{count}", True
    return name.removesuffix(W8A8), name.endswith(W8A8)


def named_target(text: str, chips: Collection[str]) -> TargetName | None:
    """Returns the meaning of a target's name: ``v7x-w8a8-8``, ``RTX 4090``, ``5090``, ``nvidia-h100-8``.

    A name may lack vendor, family and memory, and have capitals, spaces and dashes of its own; all else has
    to be there, since an RTX 4070 is no RTX 4070 Ti.

    Args:
        text: the name.
        chips: the names of the known chips.

    Returns:
        the chip and the number of devices; None for what means none of these chips.
    """
    plain, w8a8 = split_w8a8(text.strip().lower())
    counted = _COUNT.fullmatch(plain)
    ways: list[tuple[str, int | None]] = [(plain, None)]
    if counted:
        ways.insert(0 if counted[1] in chips else 1, (counted[1], int(counted[2])))
    for name, count in ways if plain == plain.strip("-") else ():
        meant = [name] if name in chips else [one for one in chips if short_name(name) in _short_names(one)]
        if meant:
            return TargetName(meant[0], w8a8, count)
    return None


def built_target(text: str, meshes: Mapping[str, Sizes]) -> str | None:
    """Returns the artifact's target that a name means: the only one of that name, or that of one device.

    ``text`` is a name as it is built, or as ``named_target`` takes it; ``meshes`` has the mesh of each of the
    artifact's targets. Returns None if there is no such target, or if several meshes are meant.
    """
    if text in meshes:
        return text
    plain = {name: split_w8a8(name.removesuffix(name_suffix(mesh))) for name, mesh in meshes.items()}
    found = named_target(text, sorted({chip for chip, _ in plain.values()}))
    if found is None:
        return None
    meant = [
        name
        for name, mesh in meshes.items()
        if plain[name] == (found.chip, found.w8a8) and found.count in (None, num_devices(mesh))
    ]
    single = TargetName(found.chip, found.w8a8).text
    return single if single in meant else meant[0] if len(meant) == 1 else None


def short_name(name: str) -> str:
    """Returns a name without what may be left out of it."""
    return _LEFT_OUT.sub("", name)


def _short_names(chip: str) -> set[str]:
    return {short_name(chip), short_name(_MEMORY.sub("", chip))}
