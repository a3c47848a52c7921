"""Brings a component's weights to the devices of a mesh: the rows that are read, and each device's part.

| transfer | a device is given | then |
|---|---|---|
| direct | its part of every parameter | |
| staged | its part of the small ones, and 1/N of the rows of the large ones | a program spreads the rows |

Which parameters are large is decided at the build: they are the inputs of ``spread_<component>``. Either way
a process reads only rows that its own devices need.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wanrun.artifact.layout import ITEM_BYTES
from wanrun.artifact.mesh import Rules, cut, device_bytes, partition_spec
from wanrun.artifact.parameters import Component, Tree, flat, nest
from wanrun.artifact.programs import Program
from wanrun.artifact.staged import ROWS, WEIGHTS, padded_shape
from wanrun.weights.experts import Footprint

if TYPE_CHECKING:
    import jax

Index = tuple[slice, ...]


@dataclass(frozen=True)
class _Given:
    """The parts of one parameter that each device of this process is given.

    ``shape`` is the whole array's, padding included; ``unit``: indices of axis 0 in a checksummed row.
    """

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    parts: Mapping[jax.Device, Index]
    unit: int

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows that some device needs, in rising order."""
        spans = {index[0].indices(self.shape[0])[:2] for index in self.parts.values()}
        wanted = (range(start // self.unit, -(-stop // self.unit)) for start, stop in spans)
        return tuple(sorted({row for rows in wanted for row in rows}))

    def of(self, held: np.ndarray) -> list[np.ndarray]:
        """Returns each device's part; ``held`` has ``rows``, one behind the other along axis 0."""
        places = {row: place * self.unit for place, row in enumerate(self.rows)}
        parts = []
        for first, *others in self.parts.values():
            start, stop, _ = first.indices(self.shape[0])
            begin = places[start // self.unit] + start % self.unit
            parts.append(held[(slice(begin, begin + stop - start), *others)])
        return parts


class Transfer:
    """How one component comes to the devices of a mesh.

    ``rules`` are the mesh axes that a logical axis of a parameter is cut along. ``spread`` is the program
    that spreads its large parameters; None for a direct transfer. ``local`` are the devices of this process;
    None: as JAX says. ``rows`` has by path the rows to read of parameters that are not read whole, for
    ``Restore``.
    """

    def __init__(
        self,
        component: Component,
        rules: Rules,
        mesh: jax.sharding.Mesh,
        spread: Program | None = None,
        local: Collection[jax.Device] | None = None,
    ) -> None:
        from jax.sharding import NamedSharding, PartitionSpec

        staged = set[str]() if spread is None else set(spread.avals["inputs"][ROWS])
        self._staged, self._copied = staged, bool(staged) and mesh.devices.flat[0].platform == "cpu"
        self._component, self._rules, self._mesh = component, rules, mesh
        self._given: dict[str, _Given] = {}
        self.rows: dict[str, tuple[int, ...]] = {}
        self._local = set(mesh.local_devices if local is None else local)
        for path, parameter in component.parameters.items():
            layout = parameter.layout
            if path in staged:
                shape, along = padded_shape(layout, mesh.size), PartitionSpec(mesh.axis_names)
            else:
                cuts = cut(parameter.axes, layout.shape, rules, mesh.shape)
                shape, along = layout.shape, partition_spec(cuts)
            sharding = NamedSharding(mesh, along)
            parts = sharding.devices_indices_map(shape)
            own = {device: index for device, index in parts.items() if device in self._local and index}
            given = _Given(shape, sharding, own, layout.row_shape[0])
            self._given[path] = given
            if given.rows != tuple(range(layout.rows)):
                self.rows[path] = given.rows

    @property
    def footprint(self) -> Footprint:
        """The bytes that the component takes once it is in its place.

        CPU devices alias a part that is consecutive in the host copy, and copy any other. Spread parameters
        are on each device again, and no host copy stays.
        """
        layouts = {path: one.layout for path, one in self._component.parameters.items()}
        held = {path: len(self.rows.get(path, range(one.rows))) for path, one in layouts.items()}
        host = sum(held[path] * one.row_bytes for path, one in layouts.items())
        device = device_bytes(self._component, self._rules, self._mesh.shape)
        if self._staged:
            return Footprint(host, device, device * len(self._local))
        copied = sum(
            math.prod(len(range(*one.indices(size))) for one, size in zip(index, layout.shape, strict=True))
            * ITEM_BYTES[layout.dtype]
            for path, layout in layouts.items()
            for index in self._given[path].parts.values()
            if any(one != slice(None) for one in index[1:])
        )
        return Footprint(host, device, host + copied)

    def put(self, tree: Tree) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Gives the devices their parts of the arrays that were read, as of ``Restore.result``.

        Returns, by path, the parameters as programs take them, and the rows that have to be spread.
        """
        import jax

        arrays = flat(tree)
        if self._copied:  # by aliasing they would keep the block of the rows in memory
            arrays = {path: one if path in self._staged else np.array(one) for path, one in arrays.items()}
        pieces = {path: self._given[path].of(array) for path, array in arrays.items()}
        devices = {path: list(self._given[path].parts) for path in arrays}
        placed = jax.block_until_ready(jax.device_put(pieces, devices))
        whole: dict[str, jax.Array] = {
            path: jax.make_array_from_single_device_arrays(
                self._given[path].shape, self._given[path].sharding, placed[path], dtype=arrays[path].dtype
            )
            for path in arrays
        }
        rows = {path: whole.pop(path) for path in self._staged}
        return whole, rows


class Staged:
    """Weights of which ``direct`` are in their place, and ``rows`` have yet to be spread; both by path.

    The first caller of ``weights`` spreads them, in its own thread: the processes of a mesh have to run their
    collectives in the same order, and transfers end in any order.
    """

    def __init__(
        self, direct: dict[str, jax.Array], rows: dict[str, jax.Array], spread: Callable[..., Any]
    ) -> None:
        self._lock = threading.Lock()
        self._direct, self._rows, self._spread = direct, rows, spread
        self._weights: Tree | None = None

    def weights(self) -> Tree:
        """Returns the component's weights as programs take them, in nested dicts.

        Raises ArtifactError if the program cannot be loaded.
        """
        with self._lock:
            if self._weights is None:
                spread = self._spread(**{ROWS: self._rows})[WEIGHTS]
                self._weights = nest({**self._direct, **spread})
                self._direct, self._rows = {}, {}
            return self._weights
