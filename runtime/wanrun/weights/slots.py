"""The slots of experts on the device, as programs take them beside weights: see ``wanrun.artifact.slots``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from wanrun.artifact.layout import BITS
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.artifact.mesh import cut, partition_spec
from wanrun.artifact.parameters import Tree, nest
from wanrun.artifact.programs import ProfileOptions
from wanrun.artifact.slots import Slot, slots_of
from wanrun.opened.artifact import OpenedArtifact
from wanrun.weights.buffers import DTYPES

if TYPE_CHECKING:
    import jax


class Slots:
    """The slots of profiles that are built with the same options. They are zeros, which change nothing.

    Zeros are the same for every expert and every layer, and all programs share them.

    Args:
        opened: the artifact.
        options: the profiles' build options.
    """

    def __init__(self, opened: OpenedArtifact, options: ProfileOptions) -> None:
        component = opened.manifest.components[TRANSFORMERS[0]]
        self._opened, self._slots = opened, slots_of(component, options.lora_rank)
        as_bits = opened.program_set.kernels.weight_bits and options.dtype in BITS
        self._dtype = np.dtype(BITS[options.dtype]) if as_bits else DTYPES[options.dtype]
        self._stacks = opened.program_set.layers

    def of(self, expert: str) -> Tree:
        """Returns all slots of an expert, nested dicts by path; empty without slots."""
        del expert
        return self._whole

    def outside(self, expert: str) -> Tree:
        """Returns those slots of an expert that are in no stack of layers."""
        del expert
        return self._outside

    def layer(self, expert: str, stack: str, number: int) -> Tree:
        """Returns the slots of one layer of an expert, without the layer axis."""
        del expert, number
        return self._layers[stack]

    @functools.cached_property
    def _whole(self) -> Tree:
        return self._zeros(self._slots)

    @functools.cached_property
    def _outside(self) -> Tree:
        return self._zeros(
            {path: slot for path, slot in self._slots.items() if _top(path) not in self._stacks}
        )

    @functools.cached_property
    def _layers(self) -> Mapping[str, Tree]:
        """One layer of each stack."""
        one = {path: Slot(slot.shape[1:], slot.axes[1:]) for path, slot in self._slots.items()}
        stacks = {name: {path: one[path] for path in one if _top(path) == name} for name in self._stacks}
        return {name: self._zeros(slots).get(name, {}) for name, slots in stacks.items()}

    def _zeros(self, slots: Mapping[str, Slot]) -> Tree:
        """Returns zeros of these slots on the device, or on a mesh as its programs take them."""
        import jax

        def zeros(slot: Slot) -> jax.Array:
            sharding, none = self._sharding(slot), np.zeros((), self._dtype)
            whole = np.broadcast_to(none, slot.shape)
            return jax.make_array_from_callback(slot.shape, sharding, lambda index: np.array(whole[index]))

        return nest({path: zeros(slot) for path, slot in slots.items()})

    def _sharding(self, slot: Slot) -> jax.sharding.Sharding:
        from jax.sharding import NamedSharding

        device = self._opened.device
        if device.mesh is None:
            return device.whole
        cuts = cut(slot.axes, slot.shape, self._opened.program_set.rules, device.mesh.shape)
        return NamedSharding(device.mesh, partition_spec(cuts))


def _top(path: str) -> str:
    return path.partition("/")[0]
