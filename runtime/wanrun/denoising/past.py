"""The past of a video of Helios: an image or a video that it continues, each with a little noise.

Source: diffusers' HeliosPipeline. The draws before those of the first chunk, in order: the samples of what is
encoded, the image (or a video's first frame) before its frames; then for each of the two the noise's sizes,
one for an image and one per latent frame for a video's chunks, each before its noise.
"""

from __future__ import annotations

__all__ = ["Given", "Latents", "Past"]

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wanrun.denoising.noise import Noise

LEAST, MOST = 0.111, 0.135
"""The sizes of the noise of the given frames. More of it gives more movement."""


@dataclass(frozen=True)
class Latents:
    """The encoder's result for frames: the distribution of normalised latents, float32 (B, C, T, h, w).

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
    """The inputs of the first chunk's steps from the past.

    Attributes:
        past: the last latent frames before it, float32 (B, C, R, h, w), zeros where there are none.
        first: the first latent frame (B, C, 1, h, w).
    """

    past: np.ndarray
    first: np.ndarray


@dataclass(frozen=True)
class Given:
    """An image or a video that a video continues.

    Attributes:
        first: the first frame, T = 1.
        chunks: the last chunks, each of which is encoded alone; for an image one whose frames are all it.
        before: how many chunks of the video are before these: they are drawn for, and not taken.
        still: whether it is an image: of the latents of its chunk the last is taken.
        frames: R, latent frames that steps take of the past.
    """

    first: Latents
    chunks: Sequence[Latents]
    before: int
    still: bool
    frames: int

    def past(self, draw: Noise) -> Past:
        """Returns the past, by the noise of the video."""
        start, drawn = self.first.sample(draw), self.chunks[-1].mean.shape
        for _ in range(self.before):
            draw(drawn)
        chunks = [chunk.sample(draw) for chunk in self.chunks]
        start = _noised(start, draw, 1)
        for _ in range(self.before):
            draw.uniform(drawn[2])
            draw(drawn)
        if self.still:
            chunks = [_noised(chunks[0][:, :, -1:], draw, 1)]
        else:
            chunks = [_noised(chunk, draw, chunk.shape[2]) for chunk in chunks]
        B, C, _, h, w = drawn
        zeros = np.zeros((B, C, self.frames, h, w), np.float32)
        return Past(np.concatenate([zeros, *chunks], axis=2)[:, :, -self.frames :], start)


def _noised(latents: np.ndarray, draw: Noise, sizes: int) -> np.ndarray:
    """Returns latents with noise of so many drawn sizes, one for all latent frames or one for each."""
    share = draw.uniform(sizes).reshape(-1, 1, 1) * np.float32(MOST - LEAST) + np.float32(LEAST)
    return share * draw(latents.shape) + (1 - share) * latents
