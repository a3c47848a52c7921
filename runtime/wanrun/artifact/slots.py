"""Slots of low rank beside a transformer's weights: which inputs a program that has them takes.

A layer of weight W (out, in) has ``lora_a`` (R, in) and ``lora_b`` (out, R), and computes with W + B A.
Stacked layers have an axis of layers in front. See ``wanbuild.models.low_rank``.
"""

from __future__ import annotations

__all__ = ["LORA", "slots_beside", "slots_bytes", "slots_of"]

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from wanrun.artifact.mesh import Rules, Sizes, cut, shard_count
from wanrun.artifact.parameters import LAYERS, Component

LORA = "lora"
"""The programs' input with the slots: nested dicts, as of the weights that the program takes."""

_WEIGHT = "/weight"


class Slot(NamedTuple):
    """The shape and the logical axes (a name or None per dimension) of one array of slots.

    The axes are its weight's, so a mesh cuts both alike. Mesh axes that only store parts of weights do not
    cut slots (``mesh.cut``): their rank has no axis, and they are small.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def slots_beside(shape: Sequence[int], axes: Sequence[str | None], rank: int) -> dict[str, Slot]:
    """Returns the slots of a layer, by name.

    Args:
        shape: of its weight: (out, in), with any axis of layers in front.
        axes: the weight's logical axes.
        rank: the slots' rank.
    """
    (*layers, outputs, inputs), (*stacked, rows, columns) = shape, axes
    return {
        "lora_a": Slot((*layers, rank, inputs), (*stacked, None, columns)),
        "lora_b": Slot((*layers, outputs, rank), (*stacked, rows, None)),
    }


def slots_of(component: Component, rank: int) -> Mapping[str, Slot]:
    """Returns the slots of a transformer, by path; none of rank 0."""
    found = dict[str, Slot]()
    for path, one in component.parameters.items():
        matrix = len([axis for axis in one.axes if axis != LAYERS]) == 2
        if rank and matrix and path.endswith(_WEIGHT):
            own = slots_beside(one.layout.shape, one.axes, rank)
            found |= {f"{path.removesuffix(_WEIGHT)}/{name}": slot for name, slot in own.items()}
    return found


def slots_bytes(slots: Iterable[Slot], item: int, rules: Rules, sizes: Sizes) -> int:
    """Returns the bytes of slots, with values of ``item`` bytes, on one device of JAX's mesh."""
    return sum(
        item * math.prod(one.shape) // shard_count(cut(one.axes, one.shape, rules, sizes), sizes)
        for one in slots
    )
