"""Values of options as people write them: seeds, sizes, lists of numbers, and solvers."""

from __future__ import annotations

__all__ = ["parse_numbers", "parse_seed", "parse_size", "parse_solver", "parse_whole_numbers"]

import re
from collections.abc import Mapping
from types import MappingProxyType

from wanrun.errors import UsageError, shortened

RANDOM = "random"
"""The seed that is drawn anew for each prompt."""


def parse_seed(text: str) -> int | str:
    """Parses a seed. Raises UsageError for what is neither an integer nor ``random``."""
    try:
        return text if text == RANDOM else int(text)
    except ValueError:
        raise UsageError("wrong_type", f"{text!r} is neither an integer nor {RANDOM}") from None


def parse_size(text: str) -> tuple[int, int]:
    """Parses ``832x480`` or ``832*480`` to (width, height) in pixels.

    Raises:
        UsageError: if the text has neither form.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,4})[xX*]([1-9][0-9]{0,4})", text.strip())
    if match is None:
        raise UsageError(
            "wrong_type", "not a size", expected="WIDTHxHEIGHT such as 832x480", found=shortened(text)
        )
    return int(match[1]), int(match[2])


def parse_numbers(text: str) -> list[float]:
    """Parses numbers separated by commas. Raises UsageError if one of them is not a number."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            "wrong_type",
            "not a list of numbers",
            expected="numbers with commas between them",
            found=shortened(text),
        ) from None


def parse_whole_numbers(text: str) -> list[int]:
    """Parses whole numbers separated by commas. Raises UsageError if one of them is not a number."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            "wrong_type", "not a list of whole numbers", expected="such as 1,2,3", found=shortened(text)
        ) from None


_SOLVERS: Mapping[str, str] = MappingProxyType(
    {
        other: name
        for name, others in (
            ("unipc", "unipcmultistepscheduler flowunipcmultistepscheduler uni_pc uni_pc_bh2"),
            ("dpm++", "dpmsolvermultistepscheduler flowdpmsolvermultistepscheduler dpm++_2m dpmpp_2m"),
            ("euler", "flowmatcheulerdiscretescheduler"),
            ("lcm", "flowmatchlcmscheduler"),
            ("flow-map", "flowmapeulerdiscretescheduler flowmapdiscretescheduler"),
            ("self-forcing", "selfforcingflowmatchscheduler"),
        )
        for other in (name, *others.split())
    }
)
"""The solver by its names in diffusers, in Wan's own code and in ComfyUI, in lower case."""


def parse_solver(text: str) -> str:
    """Returns the solver that a name of other tools stands for, or else the text."""
    return _SOLVERS.get(text.lower(), text)
