"""Columns of a video that the devices of a mesh share: each encodes or decodes its own.

A convolution reads a column of each neighbour, so the neighbours exchange those before it. A width that does
not divide is padded on the right. The padding is zeroed before every convolution, like everything
outside of the video, and trimmed at the end.

Arrays are (B, T, H, W, C).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from wanbuild.models.partition import ACTIVATIONS, constrain, mesh_sizes

STORED = (None, None, None, "columns")
"""The first axes of results, and of what ``Columns.carry`` leaves: see ``partition.ACTIVATIONS``."""


@dataclass(frozen=True)
class Columns:
    """The columns of one device; at every resolution they are the same part of the video.

    The ``count`` devices along ``axes`` of the mesh share the ``width`` columns of latents in this order.
    """

    axes: tuple[str, ...]
    count: int
    width: int

    @classmethod
    def of(cls, width: int) -> Columns | None:
        """Returns the columns of latents of this width on the mesh; None without a mesh."""
        sizes = mesh_sizes()
        axes = tuple(axis for axis in ACTIVATIONS["columns"] if axis in sizes)
        return cls(axes, math.prod(sizes.values()), width) if axes else None

    @property
    def own(self) -> int:
        """Columns of latents on one device, with padding."""
        return -(-self.width // self.count)

    def run(self, function: Callable[[Any], Any], whole: Any, scale: int) -> Any:
        """Runs a function on every device for its columns, and returns whole results, trimmed.

        Each device gets all of ``whole``, a pytree of arrays, from which the function takes columns (see
        ``take``); it returns arrays with ``scale`` columns per column of latents.
        """
        return self.carry(lambda whole, _: (function(whole), None), whole, None, scale)[0]

    def carry(
        self, function: Callable[[Any, Any], tuple[Any, Any]], whole: Any, own: Any, scale: int
    ) -> tuple[Any, Any]:
        """Runs a function as ``run`` does; the state that it returns stays on the devices, for the next call.

        The function takes ``whole`` and this device's part of ``own``, the state that an earlier call
        returned (without arrays before the first call). It returns arrays of this device's columns, and any
        arrays as the new state.

        Returns whole results, trimmed, and the state, as arrays of which each device has a part.
        """
        along = PartitionSpec(*(name and self.axes for name in STORED))
        results, left = jax.shard_map(
            function, in_specs=(PartitionSpec(), along), out_specs=(along, along), check_vma=False
        )(whole, own)
        return jax.tree.map(lambda x: constrain(x[:, :, :, : self.width * scale]), results), left

    def _place(self, x: jax.Array) -> tuple[jax.Array, int]:
        """Returns the number of the array's first column, and the columns of the whole video."""
        return jax.lax.axis_index(self.axes) * x.shape[3], self.width * (x.shape[3] // self.own)

    def take(self, x: jax.Array) -> jax.Array:
        """Returns this device's columns of a whole array, padded with zeros."""
        scale = x.shape[3] // self.width
        extra = (self.own * self.count - self.width) * scale
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, extra), (0, 0)))
        first = jax.lax.axis_index(self.axes) * self.own * scale
        return jax.lax.dynamic_slice_in_dim(x, first, self.own * scale, 3)

    def beside(self, x: jax.Array, before: int, after: int) -> jax.Array:
        """Returns this device's columns with the neighbours' next to them, zeros outside of the video.

        ``before`` columns come from the left neighbour, ``after`` from the right one.
        """
        if self.own * self.count != self.width:
            first, width = self._place(x)
            real = first + jnp.arange(x.shape[3]) < width
            x = jnp.where(real[:, None], x, jnp.zeros((), x.dtype))
        parts = [x]
        # A device without a source gets zeros.
        if before:
            right = [(device, device + 1) for device in range(self.count - 1)]
            parts.insert(0, jax.lax.ppermute(x[:, :, :, -before:], self.axes, right))
        if after:
            left = [(device + 1, device) for device in range(self.count - 1)]
            parts.append(jax.lax.ppermute(x[:, :, :, :after], self.axes, left))
        return jnp.concatenate(parts, 3)

    def all(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns all devices' columns, and a mask bool (W,) of those without padding; None without any."""
        columns = jax.lax.all_gather(x, self.axes, axis=3, tiled=True)
        if self.own * self.count == self.width:
            return columns, None
        return columns, jnp.arange(columns.shape[3]) < self._place(x)[1]
