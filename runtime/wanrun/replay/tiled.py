"""Compares a profile's steps with those of a small profile, where both see the same tokens.

All layers of a transformer treat tokens alike, and attention to keys that are each there k times is attention
to the keys once. So for latents of a large profile that repeat each token of a small one k times, with the
rotary tables of the repeated tokens, the velocity is such a repetition too. The small profile's result was
recorded elsewhere; the large one's takes a chip.

Equal tokens lie side by side: a block of keys that is lost takes whole tokens with it. The rotary tables are
those of the large profile's far corner: attention knows distances alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from wanrun.artifact.programs import Profile
from wanrun.generation.pipeline import Pipeline
from wanrun.replay.velocity import Start
from wanrun.trust.proxy import grid_of, patch_of


@dataclass(frozen=True)
class Tiling:
    """Which token of a small profile each token of a large one repeats.

    Attributes:
        patch: a token's latent rows and columns.
        small: rows and columns of a frame's tokens.
        large: likewise.
        frames: latent frames, of both.
    """

    patch: tuple[int, int]
    small: tuple[int, int]
    large: tuple[int, int]
    frames: int

    @cached_property
    def _source(self) -> np.ndarray:
        """The small profile's token, of a frame, that each of the large one's repeats: equal runs."""
        (rows, columns), (height, width) = self.small, self.large
        return np.arange(height * width) // (height * width // (rows * columns))

    def cells(self, array: np.ndarray) -> np.ndarray:
        """Repeats the tokens of an array (..., h, w) of latent cells."""
        (p, q), (rows, columns), (height, width) = self.patch, self.small, self.large
        other = array.shape[:-2]
        tokens = array.reshape(*other, rows, p, columns, q).swapaxes(-3, -2)
        tokens = tokens.reshape(*other, -1, p, q)[..., self._source, :, :]
        tokens = tokens.reshape(*other, height, width, p, q).swapaxes(-3, -2)
        return np.ascontiguousarray(tokens.reshape(*other, height * p, width * q))

    def table(self, array: np.ndarray) -> np.ndarray:
        """Returns a rotary table (S, ...) of the large profile for the tokens that it repeats."""
        (rows, columns), (height, width) = self.small, self.large
        row, column = np.divmod(self._source, columns)
        corner = (row + height - rows) * width + column + width - columns
        frame = np.arange(self.frames)[:, None] * (height * width)
        index = np.arange(len(array))  # on a mesh there is padding behind the tokens
        index[: self.frames * height * width] = (frame + corner).ravel()
        return array[index]


def repeated(pipeline: Pipeline, start: Start, small: np.ndarray, large: Profile) -> tuple[Start, np.ndarray]:
    """Returns what a profile's velocities are computed from, and the velocities, of a small one's tokens.

    Args:
        pipeline: it has loaded the small profile.
        start: what the small profile's velocities are computed from.
        small: those velocities.
        large: the profile that repeats the tokens.
    """
    import jax

    manifest, other = pipeline.manifest, pipeline.session(large)
    grids = grid_of(manifest, pipeline.profile), grid_of(manifest, large)
    tiling = Tiling(patch_of(manifest), *grids, start.noise.shape[2])

    def again(array: Any) -> np.ndarray:
        values = np.asarray(array)
        return tiling.cells(values) if values.shape[-2:] == start.noise.shape[-2:] else values

    given = other.programs.weights.put(jax.tree.map(again, dict(start.conditions.steps)))
    conditions = replace(start.conditions, steps=given)
    noise = again(start.noise)
    return replace(start, noise=noise, conditions=conditions, table=tiling.table), again(small)
