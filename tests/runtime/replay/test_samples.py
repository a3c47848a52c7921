"""Sample images and videos: fixed by a seed, and never alike."""

from __future__ import annotations

import numpy as np

from helpers.manifests import full_manifest, plain_manifest, without_past
from wanrun.replay.samples import sample_image, sample_mask, sample_media, sample_video


def test_they_are_fixed_by_the_seed() -> None:
    first, again, other = (np.asarray(sample_image(40, 24, seed)) for seed in (1, 1, 2))
    assert first.shape == (24, 40, 3)
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    frames = [np.asarray(frame) for frame in sample_video(40, 24, 3, 1)]
    assert len(frames) == 3 and not np.array_equal(frames[0], frames[1])


def test_a_part_of_each_mask_is_on() -> None:
    masks = np.stack([np.asarray(mask) for mask in sample_mask(96, 64, 5)])
    assert all(0 < mask.mean() < 255 for mask in masks)
    assert not np.any(masks.min(0)) and not np.array_equal(masks[0], masks[4])


def test_media_are_those_that_the_model_takes() -> None:
    manifest = without_past(full_manifest())
    (profile,) = manifest.profiles.values()
    assert sample_media(plain_manifest(), profile) is None
    media = sample_media(manifest, profile, mode="replace", without=["mask"])
    assert media is not None and media.image is not None and media.mask is None
    # Of a model with windows fewer than a window has, so that the last ones are padded.
    assert isinstance(media.video, list) and len(media.video) == profile.num_frames - 2
