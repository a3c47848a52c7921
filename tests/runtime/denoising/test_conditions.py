"""What images and videos add to a run of the denoising loop."""

from __future__ import annotations

import numpy as np

from wanrun.denoising.conditions import Conditions


def test_without_a_held_frame_the_latents_are_the_result() -> None:
    latents = np.ones((1, 2, 3, 4, 5), np.float32)
    assert Conditions().finish(latents) is latents


def test_a_held_frame_is_in_its_place_of_every_video() -> None:
    latents, held = np.zeros((2, 3, 4, 2, 2), np.float32), np.full((3, 1, 2, 2), 7, np.float32)
    finished = Conditions(held=held).finish(latents)
    assert (finished[:, :, 0] == 7).all() and (finished[:, :, 1:] == 0).all()
    assert not latents.any()  # what was given is not changed
