"""The LoRAs that a request chooses, as it names them and as people write them."""

from __future__ import annotations

__all__ = ["EXPERTS", "LoraChoice", "parse_lora"]

import os
from typing import Annotated

from msgspec import Meta, Struct

from wanrun.artifact.model import MAX_FLOAT32
from wanrun.errors import UsageError, shortened

Name = Annotated[str, Meta(min_length=1, max_length=4096)]
Strength = Annotated[float, Meta(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]

EXPERTS = ("high", "low")
"""The names of the two experts' strengths, in the order of ``TRANSFORMERS``."""


class LoraChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A LoRA that a request chooses; one strength for all, or one for each expert.

    Attributes:
        name: one of the artifact's, or an adapter's file.
        strength: factor of all that it changes; without any strength 1.
        high: that of the high-noise expert.
        low: that of the low-noise expert.
    """

    name: Name
    strength: Strength | None = None
    high: Strength | None = None
    low: Strength | None = None

    def __post_init__(self) -> None:
        if self.strength is not None and self.of_experts:
            raise ValueError(f"{self.name} has a strength, and one of an expert")

    @property
    def of_experts(self) -> dict[str, float]:
        """The strengths of single experts, by what they are called."""
        both = {"high": self.high, "low": self.low}
        return {name: value for name, value in both.items() if value is not None}

    def __str__(self) -> str:
        of_experts = ",".join(f"{name}={value:g}" for name, value in self.of_experts.items())
        return f"{self.name}:{of_experts or format(1.0 if self.strength is None else self.strength, 'g')}"


def parse_lora(text: str, files: bool = True) -> LoraChoice:
    """Parses ``NAME``, ``NAME:0.8`` or ``NAME:high=0.9,low=0.6``.

    Args:
        text: the text.
        files: whether an existing file whose own name has the colon takes precedence.

    Raises:
        UsageError: if what is behind the last colon is no strength, or not a finite one.
    """
    name, colon, written = text.rpartition(":")
    if text and (not colon or (files and os.path.exists(text))):  # noqa: PTH110 - no file has a NUL
        return LoraChoice(name=text)
    strengths = dict[str, float]()
    for part in written.split(","):
        expert, _, number = part.rpartition("=")
        if (key := expert.strip() or "strength") in strengths or not _is_finite(number):
            raise _not_understood(text)
        strengths[key] = float(number)
    if not name or not (strengths.keys() == {"strength"} or strengths.keys() <= {*EXPERTS}):
        raise _not_understood(text)
    return LoraChoice(name=name, **strengths)


def _is_finite(number: str) -> bool:
    try:
        return abs(float(number)) <= MAX_FLOAT32
    except ValueError:
        return False


def _not_understood(text: str) -> UsageError:
    return UsageError(
        "unreadable",
        f"the LoRA {shortened(text)} is not understood",
        expected="its name or file, with nothing, a strength such as :0.8, or :high=0.9,low=0.6 behind it",
    )
