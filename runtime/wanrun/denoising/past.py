"""What a video of Helios goes on from: nothing, an image or a video, each with a little noise.

Source: diffusers' HeliosPipeline. The draws before those of the first chunk, in order: the samples of what is
encoded, the image (or a video's first frame) before its frames; then for each of the two the noise's sizes,
one for an image and one per latent frame for a video's chunks, each before its noise.
"""

from __future__ import annotations

__all__ = ["Encoded", "Past", "of_image", "of_nothing", "of_video"]

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wanrun.denoising.noise import Noise

FRAMES = 19
"""Latent frames that the steps of a chunk take of the past."""

LEAST, MOST = 0.111, 0.135
"""The sizes of the noise of what is given. More of it gives more movement."""


@dataclass(frozen=True)
class Encoded:
    """What the encoder makes of frames: the distribution of normalised latents, float32 (B, C, T, h, w).

    Attributes:
        mean: the mode.
        deviation: the standard deviation.
    """

    mean: np.ndarray
    deviation: np.ndarray

    def sample(self, draw: Noise) -> np.ndarray:
        """Returns latents by the next draw."""
        return self.mean + self.deviation * draw(self.mean.shape)


@dataclass(frozen=True)
class Past:
    """The past of a chunk.

    Attributes:
        frames: the last latent frames before it, float32 (B, C, 19, h, w), zeros where there are none.
        first: the video's first latent frame (B, C, 1, h, w); None before the first chunk of a video that
            goes on from nothing, whose own one it becomes.
    """

    frames: np.ndarray
    first: np.ndarray | None = None


def of_nothing(shape: Sequence[int]) -> Past:
    """Returns the past of a video's first chunk, whose latents have this shape (B, C, T, h, w)."""
    B, C, _, h, w = shape
    return Past(np.zeros((B, C, FRAMES, h, w), np.float32))


def of_image(image: Encoded, still: Encoded, draw: Noise) -> Past:
    """Returns the past of a video that begins with an image.

    Args:
        image: the encoded image, T = 1.
        still: a chunk of frames that are all the image, of whose latents the last is taken.
        draw: the noise of the video.
    """
    first, frames = image.sample(draw), still.sample(draw)[:, :, -1:]
    first = _noised(first, draw, 1)
    return Past(_last(_noised(frames, draw, 1)), first)


def of_video(first: Encoded, chunks: Sequence[Encoded], draw: Noise) -> Past:
    """Returns the past of a video that goes on from another.

    Args:
        first: the other one's encoded first frame, T = 1.
        chunks: its frames, chunk by chunk, each of which is encoded alone. Frames at its beginning are left
            out, so that these are whole.
        draw: the noise of the video.
    """
    start, *rest = [one.sample(draw) for one in (first, *chunks)]
    start = _noised(start, draw, 1)
    frames = [_noised(chunk, draw, chunk.shape[2]) for chunk in rest]
    return Past(_last(np.concatenate(frames, axis=2)), start)


def _noised(latents: np.ndarray, draw: Noise, sizes: int) -> np.ndarray:
    """Returns latents with noise of so many drawn sizes, one for all latent frames or one for each."""
    share = draw.uniform(sizes).reshape(-1, 1, 1) * np.float32(MOST - LEAST) + np.float32(LEAST)
    return share * draw(latents.shape) + (1 - share) * latents


def _last(latents: np.ndarray) -> np.ndarray:
    """Returns the last latent frames of a past, behind zeros if there are fewer."""
    frames = of_nothing(latents.shape).frames
    return np.concatenate([frames, latents], axis=2)[:, :, -FRAMES:]
