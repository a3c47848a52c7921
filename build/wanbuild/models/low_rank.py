"""Slots in a transformer's layers: changes of low rank to their weights, which a program takes as inputs.

A layer with slots of rank R computes y = x Wᵀ + (x Aᵀ) Bᵀ + b: ``lora_a`` is A (R, in), ``lora_b`` is B
(out, R), as PEFT has them, with any strength in B. Zeros change nothing. Changes of a smaller rank are padded
with zeros; several are concatenated along the rank. Slots of 8-bit weights are not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx

from wanbuild.models.eight_bit import linear_layers
from wanbuild.models.params import Tree, param
from wanrun.artifact.parameters import nest
from wanrun.artifact.slots import slots_beside


def declare_slots(module: Any, rank: int, dtype: Any) -> Any:
    """Declares slots of one rank and dtype for the weight of every ``Linear``; rank 0 declares none.

    It changes the abstract transformer and returns it.
    """
    for layer in linear_layers(module).values() if rank else ():
        axes = layer.weight.get_metadata()["axes"]
        for name, slot in slots_beside(layer.weight.shape, axes, rank).items():
            setattr(layer, name, param(slot.shape, dtype, slot.axes))
        layer.has_slots = True
    return module


def abstract_slots(module: nnx.Module) -> Tree:
    """Returns a module's slots as nested dicts of ``jax.ShapeDtypeStruct``; empty without slots."""
    return nest(
        {
            f"{path}/{name}": getattr(layer, name).get_value()
            for path, layer in linear_layers(module).items()
            if layer.has_slots
            for name in ("lora_a", "lora_b")
        }
    )


def with_slots(params: Mapping[str, Any], slots: Mapping[str, Any] | None) -> Tree:
    """Returns parameters and slots as one, nested dicts as both are; None for no slots."""
    joined = dict(params)
    for name, below in (slots or {}).items():
        joined[name] = with_slots(joined.get(name, {}), below) if isinstance(below, Mapping) else below
    return joined
