"""The ways to combine a step's passes with the positive and the negative prompt.

A program has the input that a guider needs if it was built for it; all programs with guidance have ``cfg``.
"""

from __future__ import annotations

__all__ = ["BUILT", "inputs_of"]

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

GuiderName = Literal["cfg", "cfg-zero"]


class Guider(msgspec.Struct, frozen=True):
    """A row of the table. None of them makes more passes than ``cfg``.

    Attributes:
        name: its name.
        input: the float32 scalar by which a step is told to use it, 1 for yes and 0 for no; None where
            programs need no input.
        zero_steps: how many first steps have no velocity where none is given.
    """

    name: GuiderName
    input: str | None
    zero_steps: int


GUIDERS: Mapping[str, Guider] = MappingProxyType(
    {one.name: one for one in (Guider("cfg", None, 0), Guider("cfg-zero", "guidance_projection", 1))}
)
"""By name, the default first."""

BUILT = tuple(one.name for one in GUIDERS.values() if one.input is not None)
"""Those that a profile is built for, or not."""


def inputs_of(guiders: Sequence[str]) -> tuple[str, ...]:
    """Returns the inputs that steps take for these guiders."""
    return tuple(one for name in guiders if (one := GUIDERS[name].input) is not None)
