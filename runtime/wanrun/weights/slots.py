"""The slots of experts on the device, as programs take them with weights: see ``wanrun.artifact.slots``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from wanrun.artifact.layout import BITS
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.artifact.mesh import cut, partition_spec
from wanrun.artifact.parameters import Tree, nest
from wanrun.artifact.programs import ProfileOptions
from wanrun.artifact.slots import Slot, slots_bytes, slots_of
from wanrun.opened.opened_artifact import OpenedArtifact
from wanrun.weights.buffers import DTYPES

if TYPE_CHECKING:
    import jax

T = TypeVar("T")


class Slots:
    """The slots of profiles that are built with the same options, and their zeros, which change nothing.

    Zeros are the same for every expert and every layer, and all programs share them. ``dtype`` is what slots
    hold; ``stacks`` are the names of the stacks of layers, where layers stream.
    """

    def __init__(self, opened: OpenedArtifact, options: ProfileOptions) -> None:
        component = opened.manifest.components[TRANSFORMERS[0]]
        self._opened, self._slots = opened, slots_of(component, options.lora_rank)
        as_bits = opened.program_set.kernels.weight_bits and options.dtype in BITS
        self.dtype: np.dtype[Any] = DTYPES[options.dtype]
        self._passed = np.dtype(BITS[options.dtype]) if as_bits else self.dtype
        self.stacks = tuple(opened.program_set.layers)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every slot of an expert, by path."""
        return {path: slot.shape for path, slot in self._slots.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots of an expert, on one device."""
        mesh, item = self._opened.device.mesh, self.dtype.itemsize
        rules = self._opened.program_set.rules
        return slots_bytes(self._slots.values(), item, rules, {} if mesh is None else mesh.shape)

    def put(self, arrays: Mapping[str, np.ndarray], without_layers: bool = False) -> Tree:
        """Puts filled slots, by path and of ``dtype``, on the device, or on a mesh, as programs take them.

        ``without_layers`` says that they are of one layer, and have no axis of layers.
        """
        import jax

        def placed(path: str, array: np.ndarray) -> jax.Array:
            axes = self._slots[path].axes[1 if without_layers else 0 :]
            passed, sharding = array.view(self._passed), self._sharding(Slot(array.shape, axes))
            return jax.make_array_from_callback(array.shape, sharding, lambda index: np.array(passed[index]))

        return nest({path: placed(path, array) for path, array in arrays.items()})

    @functools.cached_property
    def zeros(self) -> Tree:
        """All slots of an expert, nested dicts by path; empty without slots."""
        return self._zeros(self._slots)

    def zeros_of(self, stack: str) -> Tree:
        """Those of one layer of a stack, without the layer axis; of ``""`` those that are in no stack."""
        return self._parts[stack]

    @functools.cached_property
    def _parts(self) -> Mapping[str, Tree]:
        one = {path: Slot(slot.shape[1:], slot.axes[1:]) for path, slot in self._slots.items()}
        layers = {name: self._zeros(self.within(name, one)).get(name, {}) for name in self.stacks}
        return {**layers, "": self._zeros(self.within("", self._slots))}

    def within(self, stack: str, arrays: Mapping[str, T]) -> dict[str, T]:
        """Returns what is in a stack of layers, by path; of ``""`` what is in none."""
        tops = {path: path.partition("/")[0] for path in arrays}
        return {
            path: arrays[path] for path, top in tops.items() if (top if top in self.stacks else "") == stack
        }

    def _zeros(self, slots: Mapping[str, Slot]) -> Tree:
        """Returns zeros of these slots on the device, or on a mesh as its programs take them."""
        import jax

        def zeros(slot: Slot) -> jax.Array:
            sharding, none = self._sharding(slot), np.zeros((), self._passed)
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
