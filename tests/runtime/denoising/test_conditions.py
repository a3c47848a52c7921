"""What images and videos add to a run of the denoising loop."""

from __future__ import annotations

import numpy as np

from wanrun.denoising.conditions import Conditions
from wanrun.denoising.solvers import solver_table


def test_without_a_held_frame_the_latents_are_the_result() -> None:
    latents = np.ones((1, 2, 3, 4, 5), np.float32)
    assert Conditions().finish(latents) is latents


def test_a_held_frame_is_in_its_place_of_every_video() -> None:
    latents, held = np.zeros((2, 3, 4, 2, 2), np.float32), np.full((3, 1, 2, 2), 7, np.float32)
    finished = Conditions(held=held).finish(latents)
    assert (finished[:, :, 0] == 7).all() and (finished[:, :, 1:] == 0).all()
    assert not latents.any()  # what was given is not changed


def test_the_first_sample_is_noise_or_a_video_with_noise() -> None:
    """With what weight the noise alone begins, a solver says; of every video of the batch."""
    noise, video = np.full((2, 3, 4, 2, 2), 2, np.float32), np.full((3, 4, 2, 2), 10, np.float32)
    table = solver_table("rcm-ode", 4, 1.0, timesteps=(900, 500, 400), strength=0.5)
    assert (Conditions().first_sample(noise, table) == np.float32(0.5) * 2).all()
    sample = Conditions(start=video).first_sample(noise, table)
    assert sample.dtype == np.float32 and sample.shape == noise.shape and (sample == 6).all()
