"""Tiles of a video that pass through the VAE one after the other, and are blended where they overlap.

It is diffusers' ``enable_tiling``: a tile begins every three quarters of its side, and is cut off where the
video ends. A tile has all frames, with its own history. Here all tiles have one size, so that one loop
on the device has one body: what lies outside of the video is zeroed before every convolution, as its padding
is, and attention does not see it.

Arrays are (B, T, H, W, C).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

TILE = 256
"""diffusers' default side of a tile, in pixels."""

TILE_UNIT = 4
"""A tile's side is a multiple of this many cells of latents: a quarter of it overlaps the next tile."""


@dataclass(frozen=True)
class Axis:
    """The tiles along one axis of the latents.

    A video of ``whole`` cells has tiles of ``size`` cells, each ``step`` cells after the one before.
    """

    whole: int
    size: int
    step: int

    @classmethod
    def of(cls, whole: int, side: int) -> Axis:
        """Returns the tiles of this side; one that has all cells if a second one would not begin."""
        step = side * 3 // 4
        return cls(whole, whole, whole) if whole <= step else cls(whole, side, step)

    @property
    def count(self) -> int:
        """The number of tiles."""
        return -(-self.whole // self.step)

    @property
    def shared(self) -> int:
        """Cells of a tile that the next one has too."""
        return self.size - self.step

    @property
    def end(self) -> int:
        """The cell after the last tile, perhaps outside of the video."""
        return (self.count - 1) * self.step + self.size

    def real(self, index: jax.Array) -> jax.Array:
        """Returns how many cells of a tile are in the video."""
        return jnp.minimum(self.size, self.whole - index * self.step)

    def weights(self, index: jax.Array, scale: int) -> jax.Array:
        """Returns a tile's share of each of the values that it has in common with the one before it."""
        common = jnp.minimum(self.shared, self.real(index)) * scale
        share = jnp.minimum(jnp.arange(self.shared * scale) / common, 1.0)
        return jnp.where(index > 0, share, 1.0).astype(jnp.float32)


@dataclass(frozen=True)
class Tile:
    """One of ``tiles``: its row is its number from above, its column its number from the left, both int32."""

    tiles: Tiles
    row: jax.Array
    column: jax.Array

    def take(self, x: jax.Array) -> jax.Array:
        """Returns the tile of a whole array, with zeros outside of the video."""
        for axis, (along, index) in enumerate(self._axes(), start=2):
            scale = x.shape[axis] // along.whole
            pad = [(0, 0)] * x.ndim
            pad[axis] = (0, max(0, along.end - along.whole) * scale)
            first = index * along.step * scale
            x = lax.dynamic_slice_in_dim(jnp.pad(x, pad), first, along.size * scale, axis)
        return x

    def inside(self, height: int, width: int) -> jax.Array | None:
        """Returns bool (H, W), true for what is in the video; None if all tiles are whole."""
        if all(along.end == along.whole for along, _ in self._axes()):
            return None
        (rows, row), (columns, column) = self._axes()
        below = jnp.arange(height) < rows.real(row) * (height // rows.size)
        right = jnp.arange(width) < columns.real(column) * (width // columns.size)
        return below[:, None] & right

    def masked(self, x: jax.Array) -> jax.Array:
        """Returns a tile's array with zeros outside of the video."""
        inside = self.inside(*x.shape[2:4])
        return x if inside is None else jnp.where(inside[..., None], x, jnp.zeros((), x.dtype))

    def _axes(self) -> tuple[tuple[Axis, jax.Array], tuple[Axis, jax.Array]]:
        return (self.tiles.rows, self.row), (self.tiles.columns, self.column)


@dataclass(frozen=True)
class Tiles:
    """The tiles of a video: ``rows`` along the height, ``columns`` along the width."""

    rows: Axis
    columns: Axis

    @classmethod
    def of(cls, height: int, width: int, side: int) -> Tiles | None:
        """Returns the tiles of latents of this height and width in cells; None if the video fits into one.

        ``side`` is the cells of a tile's side; 0 for no tiles.
        """
        if not side or (height <= side and width <= side):
            return None
        return cls(Axis.of(height, side), Axis.of(width, side))

    def joined(
        self, one: Callable[[Tile], jax.Array], finish: Callable[[jax.Array], Any] = lambda part: part
    ) -> Any:
        """Computes tile after tile, and returns what ``finish`` makes of them, for the whole video.

        ``one`` returns a tile's result, float32, whose height and width are multiples of the latents'.
        ``finish`` takes each part of the blended result, to which no later tile adds; it returns arrays whose
        height and width are multiples of the part's.
        """
        rows, columns = self.rows, self.columns
        first = jnp.int32(0)
        like = jax.eval_shape(lambda row, column: one(Tile(self, row, column)), first, first)
        scale = like.shape[2] // rows.size
        down, right = rows.step * scale, columns.step * scale

        def at(index: jax.Array, carry: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
            made, above, left = carry
            row, column = index // columns.count, index % columns.count
            y = one(Tile(self, row, column))
            y = _blended(above[column], y, rows.weights(row, scale), 2)
            y = _blended(left, y, columns.weights(column, scale), 3)
            part = finish(y[:, :, :down, :right])
            made = jax.tree.map(lambda whole, part: _put(whole, part, row, column), made, part)
            return made, above.at[column].set(y[:, :, down:]), y[:, :, :, right:]

        part = jax.eval_shape(lambda y: finish(y[:, :, :down, :right]), like)
        made = jax.tree.map(lambda one: jnp.zeros(self._joined_shape(one.shape), one.dtype), part)
        begun = jnp.zeros(like.shape, like.dtype)
        above = jnp.zeros((columns.count, *begun[:, :, down:].shape), like.dtype)
        made, *_ = lax.fori_loop(0, rows.count * columns.count, at, (made, above, begun[:, :, :, right:]))
        return jax.tree.map(self._cut, made)

    def _joined_shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of an array that has all parts of this shape."""
        return *part[:2], part[2] * self.rows.count, part[3] * self.columns.count, *part[4:]

    def _cut(self, made: jax.Array) -> jax.Array:
        """Returns the video of all parts, without what lies outside of it."""
        height, width = (
            size // (along.step * along.count) * along.whole
            for size, along in zip(made.shape[2:4], (self.rows, self.columns), strict=True)
        )
        return made[:, :, :height, :width]


def _put(whole: jax.Array, part: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """Returns an array with a part of it replaced."""
    first = (0, 0, row * part.shape[2], column * part.shape[3], 0)
    return lax.dynamic_update_slice(whole, part, first)


def _blended(before: jax.Array, y: jax.Array, share: jax.Array, axis: int) -> jax.Array:
    """Returns a tile whose first rows or columns pass from those of the tile before it to its own."""
    count = len(share)
    if not count:
        return y
    share = share.reshape(-1, *(1,) * (y.ndim - 1 - axis))
    common = lax.slice_in_dim(y, 0, count, axis=axis)
    return lax.dynamic_update_slice_in_dim(y, before * (1 - share) + common * share, 0, axis)
