"""Staged parameters: each device of a mesh is given some rows of them, and a program spreads those to all."""

from __future__ import annotations

from wanrun.artifact.layout import ArrayLayout
from wanrun.artifact.manifest import TRANSFORMERS

ROWS = "rows"
"""The input of a spreading program, by path: parameters padded along axis 0, and cut along it over all
devices."""

WEIGHTS = "weights"
"""Its output, by path: the same parameters as other programs take them."""


def spread_name(component: str) -> str:
    """Returns the program that spreads a component's rows; two experts share one, as all their programs."""
    return f"spread_{TRANSFORMERS[0] if component in TRANSFORMERS else component}"


def padded_shape(layout: ArrayLayout, devices: int) -> tuple[int, ...]:
    """Returns a parameter's shape when axis 0 is padded to the same whole number of rows on each device."""
    rows = -(-layout.rows // devices) * devices
    return rows * layout.row_shape[0], *layout.shape[1:]
