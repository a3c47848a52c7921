"""What a video of Helios goes on from. Compared with diffusers in tests/parity/test_helios_chunks.py."""

from __future__ import annotations

import numpy as np

from wanrun.denoising.noise import Noise
from wanrun.denoising.past import FRAMES, LEAST, MOST, Encoded, of_image, of_nothing, of_video

SHAPE = (1, 4, 9, 6, 8)


def sure(value: float, frames: int) -> Encoded:
    """A distribution of one value."""
    mean = np.full((1, 4, frames, 6, 8), value, np.float32)
    return Encoded(mean, np.zeros_like(mean))


def sizes(latents: np.ndarray, value: float) -> np.ndarray:
    """The size of the noise of each latent frame, by the mean of what is left of a large value."""
    return 1 - latents.mean(axis=(0, 1, 3, 4)) / value


def test_nothing() -> None:
    past = of_nothing(SHAPE)
    assert past.first is None and past.frames.shape == (1, 4, FRAMES, 6, 8) and not past.frames.any()


def test_an_image_is_the_first_and_the_last_frame() -> None:
    past = of_image(sure(1e4, 1), sure(2e4, 9), Noise(1))
    assert past.first is not None and past.first.dtype == past.frames.dtype == np.float32
    assert not past.frames[:, :, :-1].any()
    found = np.concatenate([sizes(past.first, 1e4), sizes(past.frames[:, :, -1:], 2e4)])
    assert (found > LEAST).all() and (found < MOST).all() and len(set(found)) == 2


def test_each_frame_of_a_video_has_noise_of_its_own_size() -> None:
    past = of_video(sure(3e4, 1), [sure(1e4, 9), sure(2e4, 9), sure(1e4, 9)], Noise(2))
    assert past.first is not None and LEAST < sizes(past.first, 3e4)[0] < MOST
    found = np.concatenate([sizes(past.frames[:, :, 1:10], 2e4), sizes(past.frames[:, :, 10:], 1e4)])
    assert (found > LEAST).all() and (found < MOST).all() and len(set(found)) == FRAMES - 1
