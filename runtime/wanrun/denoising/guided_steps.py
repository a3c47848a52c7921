"""The steps of a generation that have guidance, and those that have more of it."""

from __future__ import annotations

__all__ = ["GUIDED", "skipping_steps"]

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

GUIDED: Mapping[str, float] = MappingProxyType({"guidance_start": 0.0, "guidance_end": 1.0})
"""The options of the steps that have guidance, with what they are where none is given."""


def guided_steps(options: Mapping[str, Any], total: int) -> tuple[int, int]:
    """Returns the first step with guidance, and one past the last, by the shares of the steps in ``GUIDED``.

    Shares are rounded down, as diffusers' ``ClassifierFreeGuidance`` does.
    """
    given = {name: options.get(name) for name in GUIDED}
    start, end = (GUIDED[name] if share is None else share for name, share in given.items())
    return int(start * total), int(end * total)


def skipping_steps(options: Mapping[str, Any], total: int) -> range:
    """Returns the steps of a third pass, if they have guidance: those after one share, and before another.

    Shares are rounded down, and neither end is among the steps, as of diffusers' ``SkipLayerGuidance``.
    """
    if "skip_layers" not in options:
        return range(0)
    return range(int(options["skip_start"] * total) + 1, int(options["skip_end"] * total))
