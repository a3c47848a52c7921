"""Wan's rotary position embedding over (frame, row, column).

Source: diffusers' WanRotaryPosEmbed. The head dimension is split into three parts (44, 42 and 42 of
128), each rotated in pairs of neighbours by angles that depend on one axis of the patch grid. Here the first
of all pairs are in the first half of a head, and the second ones in the other half: rows of queries' and
keys' weights are stored so (``ROTARY``), and their products do not change. Neighbours would be lanes of two
on a TPU, and strided passes on a GPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from wanbuild.models.tracing import trace_options

THETA = 10_000.0


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """Returns the parts of the head dimension for the frame, row and column axes; each is even."""
    rows = columns = 2 * (head_dim // 6)
    return head_dim - rows - columns, rows, columns


def axis_angles(positions: np.ndarray, dim: int) -> np.ndarray:
    """Returns the angles of positions in float64, of shape (positions, dim // 2)."""
    frequencies = 1.0 / THETA ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    return positions.astype(np.float64)[:, None] * frequencies


def directions(length: int, dim: int, pooled: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Returns cosines and sines of positions 0..length-1, float64 (length, dim // 2) each.

    ``dim`` is the axis' part of the head dimension. Each position covers ``pooled`` of the table's, and has
    their mean direction.
    """
    angles = axis_angles(np.arange(length * pooled), dim).reshape(length, pooled, -1)
    cos, sin = np.cos(angles).mean(1), np.sin(angles).mean(1)
    norm = np.hypot(cos, sin)
    return cos / norm, sin / norm


def rope_tables(grid: tuple[int, int, int], head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Computes cosines and sines, float32 (S, K // 2) each, for every token of a patch grid, on the device.

    The grid is patches along frames, rows and columns; S is their product.
    """
    frames, rows, columns = (np.arange(length) for length in grid)
    return pooled_tables((frames, rows, columns), head_dim, 1)


def pooled_tables(
    positions: tuple[np.ndarray, np.ndarray, np.ndarray], head_dim: int, pool: int
) -> tuple[jax.Array, jax.Array]:
    """Computes the means of cosines and sines over blocks of positions, float32 (S, K // 2), on the device.

    ``positions`` are those of frames, rows and columns. A block has ``pool`` positions along each axis; the
    last position is repeated where it has fewer. S is the product of the blocks along the axes.

    Only the three per-axis tables are constants of the program; at 720p the full table would add 38 MB of
    StableHLO. Each value depends on one axis, so that the mean over a block is that over its axis.
    """
    angles = [axis_angles(axis, dim) for axis, dim in zip(positions, axis_dims(head_dim), strict=True)]
    grid = tuple(-(-len(axis) // pool) for axis in positions)

    def over_blocks(table: np.ndarray) -> np.ndarray:
        whole = np.pad(table, ((0, -len(table) % pool), (0, 0)), mode="edge")
        return whole.reshape(-1, pool, table.shape[1]).mean(axis=1)

    def over_grid(table: np.ndarray, axis: int) -> jax.Array:
        shape = [1, 1, 1, table.shape[1]]
        shape[axis] = grid[axis]
        full = (*grid, table.shape[1])
        return jnp.broadcast_to(jnp.asarray(table.astype(np.float32)).reshape(shape), full)

    def full_table(function: np.ufunc) -> jax.Array:
        parts = [over_grid(over_blocks(function(table)), axis) for axis, table in enumerate(angles)]
        return jnp.concatenate(parts, axis=-1).reshape(-1, head_dim // 2)

    return full_table(np.cos), full_table(np.sin)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + K // 2) of x (B, S, N, K) by tables, float32 (S, K // 2); returns float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = first * cos - second * sin, first * sin + second * cos
    if (
        trace_options().cpu
    ):  # XLA's CPU backend joins last axes value by value, which takes eight times as long
        return jnp.stack(rotated, axis=-2).reshape(x.shape)
    return jnp.concatenate(rotated, axis=-1)
