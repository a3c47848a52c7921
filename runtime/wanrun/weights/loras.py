"""The LoRAs of a generation on the device: slots that they fill, and small parameters that they change.

Slots and parameters of the last choices stay there, so that a choice that comes again costs nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wanrun.artifact.parameters import Component, Tree, flat, nest
from wanrun.weights.adapters import AdapterFile, Changes, combined
from wanrun.weights.buffers import DTYPES
from wanrun.weights.slots import Slots

if TYPE_CHECKING:
    import jax

KEPT_SHARE = 0.05
"""Of the memory where programs run: what the choices that stay there take at most, but for the one in use.

With low memory none stays."""


class AppliedLora(NamedTuple):
    """The adapter of a LoRA of a generation, and the factor of its changes by transformer."""

    file: AdapterFile
    strengths: Mapping[str, float]


Choice = tuple[str, tuple[tuple[str, float], ...]]
"""A transformer, and the digests and strengths of the adapters that change it."""


@dataclass
class _Placed:
    """What a choice has on the device: all slots of the transformer, and the small parameters that change.

    By path, ``deltas`` are the changes of those, float32 on the host; ``small`` has them once they are asked
    for.
    """

    slots: Tree
    deltas: Mapping[str, np.ndarray]
    small: dict[str, Any] = field(default_factory=dict)


_Key = tuple[Slots, Choice]
"""A choice, and the slots that it fills."""


class KeptLoras:
    """The choices that are on the device, of all profiles' slots, the one that was used last at the end.

    ``limit`` are the bytes of slots that stay; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit, self._placed = limit, OrderedDict[_Key, tuple[int, _Placed]]()
        self._lock = threading.Lock()

    def get(self, choice: _Key) -> _Placed | None:
        """Returns the arrays of a choice; None if they are not there."""
        with self._lock:
            if choice not in self._placed:
                return None
            self._placed.move_to_end(choice)
            return self._placed[choice][1]

    def make_room(self, nbytes: int) -> None:
        """Drops choices, those that were used longest ago first, until so many bytes fit with the rest."""
        with self._lock:
            while self._placed and self._limit is not None and self._nbytes + nbytes > self._limit:
                self._placed.popitem(last=False)

    def put(self, choice: _Key, nbytes: int, placed: _Placed) -> None:
        """Adds a choice, which stays until room is made."""
        with self._lock:
            self._placed[choice] = nbytes, placed

    @property
    def _nbytes(self) -> int:
        return sum(nbytes for nbytes, _ in self._placed.values())


class FilledSlots:
    """The slots of profiles that are built alike, as one generation's LoRAs fill them, in order.

    ``kept`` is what is on the device.
    """

    def __init__(
        self,
        slots: Slots,
        kept: KeptLoras,
        loras: Sequence[AppliedLora],
        components: Mapping[str, Component],
    ) -> None:
        self._slots, self._loras, self._kept, self._components = slots, tuple(loras), kept, components
        self._streamed: tuple[str, Changes] | None = None

    def of(self, expert: str) -> Tree:
        """Returns all slots of an expert, on the device: nested dicts by path; empty without slots.

        Raises UsageError if the LoRAs do not fit the slots.
        """
        choice = self._choice(expert)
        return self._placed(choice).slots if choice[1] else self._slots.zeros

    def of_part(self, expert: str, stack: str = "", number: int = 0) -> Tree:
        """Returns the slots of one layer, without the layer axis, or those that are in no stack."""
        if not self._choice(expert)[1]:
            return self._slots.zeros_of(stack)
        own = self._slots.put(self._within(stack, number, self._changes(expert).slots), bool(stack))
        return own.get(stack, {}) if stack else own

    def changed(self, expert: str, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns an expert's weights with the small parameters that the LoRAs change."""
        choice = self._choice(expert)
        if not choice[1]:
            return weights
        placed = self._placed(choice)
        if not placed.small:
            placed.small |= self._shifted(expert, flat(dict(weights)), placed.deltas)
        return _with(weights, nest(placed.small))

    def changed_part(
        self, expert: str, weights: Mapping[str, Any], stack: str = "", number: int = 0
    ) -> Mapping[str, Any]:
        """Returns one layer of an expert, or what is in no stack, with the small parameters that change."""
        if not self._choice(expert)[1]:
            return weights
        deltas = self._within(stack, number, self._changes(expert).deltas)
        named = {stack: dict(weights)} if stack else dict(weights)
        changed = nest(self._shifted(expert, flat(named), deltas))
        return _with(weights, changed.get(stack, {}) if stack else changed)

    def _within(self, stack: str, number: int, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the arrays of one layer of a stack, or those that are in none."""
        own = self._slots.within(stack, arrays)
        return {path: one[number] for path, one in own.items()} if stack else own

    def _choice(self, expert: str) -> Choice:
        used = ((one.file.sha256, one.strengths.get(expert, 0.0)) for one in self._loras)
        return expert, tuple((digest, strength) for digest, strength in used if strength)

    def _changes(self, expert: str) -> Changes:
        """Returns the changes of an expert whose layers stream, which stay on the host meanwhile."""
        if self._streamed is None or self._streamed[0] != expert:
            self._streamed = expert, self._combined(expert)
        return self._streamed[1]

    def _combined(self, expert: str) -> Changes:
        chosen = [(one.file, one.strengths.get(expert, 0.0)) for one in self._loras]
        return combined(chosen, expert, self._slots.shapes, self._slots.dtype)

    def _placed(self, choice: Choice) -> _Placed:
        """Returns the arrays of a choice on the device; puts them there if they are not."""
        if (found := self._kept.get((self._slots, choice))) is None:
            changes, nbytes = self._combined(choice[0]), self._slots.nbytes
            self._kept.make_room(nbytes)
            found = _Placed(self._slots.put(changes.slots), changes.deltas)
            self._kept.put((self._slots, choice), nbytes, found)
        return found

    def _shifted(
        self, expert: str, weights: Mapping[str, Any], deltas: Mapping[str, np.ndarray]
    ) -> dict[str, Any]:
        """Returns the parameters that change, on the device, by path."""
        parameters = self._components[expert].parameters
        return {
            path: _plus(weights[path], delta, DTYPES[parameters[path].layout.dtype])
            for path, delta in deltas.items()
        }


def _plus(array: jax.Array, delta: np.ndarray, dtype: np.dtype[Any]) -> jax.Array:
    """Returns a parameter on the device plus a change, float32; it may be passed as integers of its bits."""
    import jax

    def part(shard: Any) -> jax.Array:
        stored = np.asarray(shard.data)
        values = stored.view(dtype).astype(np.float32) + delta[shard.index]
        return jax.device_put(values.astype(dtype).view(stored.dtype), shard.device)

    parts = [part(shard) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def _with(tree: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts with some leaves replaced."""
    joined = dict(tree)
    for name, one in others.items():
        joined[name] = _with(joined[name], one) if isinstance(one, Mapping) else one
    return joined
