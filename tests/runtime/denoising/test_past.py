"""What a video of Helios goes on from. Compared with diffusers in tests/parity/test_helios.py."""

from __future__ import annotations

import numpy as np

from wanrun.denoising.noise import Noise
from wanrun.denoising.past import LEAST, MOST, Given, Latents

FRAMES = 19


def sure(value: float, frames: int) -> Latents:
    """A distribution of one value."""
    mean = np.full((1, 4, frames, 6, 8), value, np.float32)
    return Latents(mean, np.zeros_like(mean))


def sizes(latents: np.ndarray, value: float) -> np.ndarray:
    """The size of the noise of each latent frame, by the mean of what is left of a large value."""
    return 1 - latents.mean(axis=(0, 1, 3, 4)) / value


def test_an_image_is_the_first_and_the_last_frame() -> None:
    past = Given(sure(1e4, 1), [sure(2e4, 9)], 0, True, FRAMES).past(Noise(1))
    assert past.first.dtype == past.past.dtype == np.float32
    assert past.past.shape == (1, 4, FRAMES, 6, 8) and not past.past[:, :, :-1].any()
    found = np.concatenate([sizes(past.first, 1e4), sizes(past.past[:, :, -1:], 2e4)])
    assert (found > LEAST).all() and (found < MOST).all() and len(set(found)) == 2


def test_each_frame_of_a_video_has_noise_of_its_own_size() -> None:
    chunks = [sure(1e4, 9), sure(2e4, 9), sure(1e4, 9)]
    past = Given(sure(3e4, 1), chunks, 0, False, FRAMES).past(Noise(2))
    assert LEAST < sizes(past.first, 3e4)[0] < MOST
    found = np.concatenate([sizes(past.past[:, :, 1:10], 2e4), sizes(past.past[:, :, 10:], 1e4)])
    assert (found > LEAST).all() and (found < MOST).all() and len(set(found)) == FRAMES - 1


def test_chunks_that_are_left_out_are_drawn_for() -> None:
    """The noise of those that count is the same, whether the ones before them are encoded or not."""
    chunks = [sure(value, 9) for value in (4e4, 1e4, 2e4, 1e4)]
    every, last = (
        Given(sure(3e4, 1), chunks[before:], before, False, FRAMES).past(Noise(2)) for before in (0, 1)
    )
    np.testing.assert_array_equal(every.past, last.past)
    np.testing.assert_array_equal(every.first, last.first)
