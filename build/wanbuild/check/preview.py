"""Fits the linear map from latents to colours that shows a preview of a video that is not yet decoded."""

from __future__ import annotations

import math

import numpy as np

from wanrun.denoising.latents import leading_latents
from wanrun.generation.pipeline import Pipeline

CELLS = 4
"""Latent cells of a side of the drawn squares. Of a trained VAE's map that is fitted to squares of 1, 2 and 4
cells, that of 4 is nearest to made videos: docs/notes/runtime.md, "Previews"."""

SQUARES = 20
"""Squares for each unknown of the map."""

SHRINK = 1e-3
"""Share of the squares that is added to the diagonal, so that a few of them decide no colour alone."""


def fitted(pipeline: Pipeline) -> tuple[tuple[float, float, float], ...]:
    """Returns the map of the loaded profile's VAE: ``wanrun.artifact.manifest.Recorded.preview``.

    Latents are drawn in squares from the normal distribution, and decoded. The map is the least squares fit
    to the mean colours of each latent cell.
    """
    _, channels, frames, height, width = pipeline.latents_shape
    leading = leading_latents(pipeline.manifest, pipeline.profile)
    rows, columns = -(-height // CELLS), -(-width // CELLS)
    draws = math.ceil(SQUARES * (channels + 1) / (rows * columns * (frames - leading)))
    generator = np.random.default_rng(0)
    latents, colours = list[np.ndarray](), list[np.ndarray]()
    for _ in range(draws):
        squares = generator.standard_normal((1, channels, frames, rows, columns), np.float32)
        drawn = squares.repeat(CELLS, 3).repeat(CELLS, 4)[..., :height, :width]
        decoded = pipeline.decode(np.ascontiguousarray(drawn))[0]
        latents.append(np.moveaxis(drawn[0, :, leading:], 0, -1).reshape(-1, channels))
        colours.append(_mean_colours(decoded, frames - leading, height, width))
    inputs = np.pad(np.concatenate(latents).astype(np.float64), ((0, 0), (0, 1)), constant_values=1)
    penalty = SHRINK * len(inputs) * np.diag([1.0] * channels + [0.0])
    found = np.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ np.concatenate(colours))
    return tuple((round(red, 3), round(green, 3), round(blue, 3)) for red, green, blue in found.tolist())


def _mean_colours(frames: np.ndarray, count: int, height: int, width: int) -> np.ndarray:
    """Returns the mean colours of frames uint8 (F, H, W, 3) in each latent cell, (count·h·w, 3).

    The first latent frame is one frame, each other one the same number of frames.
    """
    total, tall, wide, _ = frames.shape
    cells = frames.reshape(total, height, tall // height, width, wide // width, 3).mean((2, 4))
    first, rest = cells[:1], cells[1:]
    means = rest.reshape(count - 1, -1, *rest.shape[1:]).mean(1) if count > 1 else rest
    return np.concatenate([first, means]).reshape(-1, 3)
