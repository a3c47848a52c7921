"""Columns of a video that the devices of a mesh share: each encodes or decodes its own.

A convolution reads a column of each neighbour, so the neighbours exchange those before it. A width that does
not divide is padded on the right. The padding is zeroed before every convolution, as what lies outside of the
video, and trimmed at the end.

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

    Args:
        axes: the axes of the mesh, whose devices share the columns in this order.
        count: the number of these devices.
        width: columns of the video's latents.
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

        Args:
            function: takes ``whole``; returns arrays of this device's columns.
            whole: a pytree of arrays that every device gets whole; see ``take``.
            scale: columns of a result per column of latents.
        """
        return self.carry(lambda whole, _: (function(whole), None), whole, None, scale)[0]

    def carry(
        self, function: Callable[[Any, Any], tuple[Any, Any]], whole: Any, own: Any, scale: int
    ) -> tuple[Any, Any]:
        """Runs a function as ``run`` does; what it leaves stays on the devices, for the next call.

        Args:
            function: takes ``whole`` and this device's part of ``own``; returns arrays of this device's
                columns, and what is left: any arrays of this device.
            whole: a pytree of arrays that every device gets whole; see ``take``.
            own: a pytree of what an earlier call has left; without arrays before the first call.
            scale: columns of a result per column of latents.

        Returns:
            Whole results, trimmed, and what is left, as arrays of which each device has a part.
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
        """Returns the array with columns of the neighbours, zeros outside of the video.

        Args:
            x: this device's columns.
            before: columns of the left neighbour.
            after: columns of the right one.
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
        """Returns all devices' columns, and a mask bool (W,) of those without padding, None if it is all."""
        columns = jax.lax.all_gather(x, self.axes, axis=3, tiled=True)
        if self.own * self.count == self.width:
            return columns, None
        return columns, jnp.arange(columns.shape[3]) < self._place(x)[1]
