"""The words of captions, and what they mean. Captions are written, and read, only from these tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

Colour = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""

COLOURS: Mapping[str, Colour] = MappingProxyType(
    {
        "red": (222, 44, 40),
        "green": (60, 205, 70),
        "blue": (56, 96, 238),
        "yellow": (240, 216, 48),
        "purple": (176, 64, 208),
        "white": (244, 244, 244),
    }
)
"""Colours of things; far from each other and from every ground."""

GROUNDS: Mapping[str, Colour] = MappingProxyType(
    {
        "green": (28, 84, 40),
        "blue": (24, 42, 96),
        "brown": (92, 60, 34),
        "grey": (92, 92, 96),
        "black": (14, 14, 18),
    }
)
"""Colours of the ground, darker than those of things."""

TEXTURES: Sequence[str] = ("plain", "striped", "checked", "speckled")
"""What a ground looks like; ``plain`` may be left out of a caption."""

SHAPES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "ball": ("ball", "disc"),
        "box": ("box", "square"),
        "triangle": ("triangle",),
        "star": ("star",),
    }
)
"""Words for each shape, the usual one first."""

MOTIONS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "right": ("moves to the right", "rolls to the right", "goes right", "travels from left to right"),
        "left": ("moves to the left", "rolls to the left", "goes left", "travels from right to left"),
        "up": ("moves up", "rises", "goes upwards", "travels from bottom to top"),
        "down": ("moves down", "sinks", "goes downwards", "travels from top to bottom"),
        "circle": ("moves in a circle", "goes round in a circle", "circles"),
        "grow": ("grows", "gets bigger", "becomes larger"),
        "shrink": ("shrinks", "gets smaller", "becomes smaller"),
    }
)
"""Phrases for each motion, the usual one first."""

SIZES: Mapping[str, float] = MappingProxyType({"small": 0.82, "big": 1.25})
"""Words for a radius, by its ratio to the usual one."""
