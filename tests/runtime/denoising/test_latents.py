"""The latents of a profile, and given initial ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from helpers.manifests import plain_manifest, with_model
from helpers.options import PROFILE
from wanrun.denoising.latents import check_latents, latents_shape
from wanrun.errors import UsageError


@pytest.mark.parametrize(
    ("extra", "references", "frames"), [({}, 0, 3), ({"leading_latents": 1}, 0, 4), ({}, 2, 5)]
)
def test_the_latents_of_a_profile(extra: dict[str, Any], references: int, frames: int) -> None:
    profile = structs.replace(PROFILE, num_videos=2, num_references=references)
    assert latents_shape(with_model(plain_manifest(), **extra), profile) == (2, 16, frames, 8, 12)


@pytest.mark.parametrize(
    "given", [np.zeros((1, 2), np.float16), np.zeros((2, 1), np.float32), np.full((1, 2), np.nan, np.float32)]
)
def test_latents_that_do_not_fit(given: np.ndarray) -> None:
    check_latents(np.zeros((1, 2), np.float32), (1, 2))
    with pytest.raises(UsageError):
        check_latents(given, (1, 2))
