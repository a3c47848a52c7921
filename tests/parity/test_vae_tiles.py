"""Tiles of both Wan VAEs against diffusers' ``enable_tiling``, float32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from helpers.vae_reference import TOLERANCE, Pair, decoded, encoded, pair, relative_error
from parity.test_vae22 import vae as vae22

PLAIN = {"base_dim": 4, "z_dim": 16, "dim_mult": (1, 2, 4, 4), "num_res_blocks": 1}


@contextmanager
def tiled(model: Pair, side: int) -> Iterator[None]:
    """The reference computes in tiles of this side, as far apart as diffusers' own are."""
    step = side * 3 // 4
    model.reference.enable_tiling(side, side, step, step)
    try:
        yield
    finally:
        model.reference.disable_tiling()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "side", "size", "alike"),
    [
        # Tiles of 4 cells, 3 apart: the last ones have 2 rows and 1 column; with one row of tiles alone.
        ("plain", 32, (5, 7), False),
        ("plain", 32, (3, 8), True),
        ("patches", 64, (4, 5), False),
    ],
)
def test_tiles_are_the_judge_s(form: str, side: int, size: tuple[int, int], alike: bool) -> None:
    model = vae22(num_res_blocks=1) if form == "patches" else pair(**PLAIN)
    latents = model.draw_latents(2, size)
    whole = decoded(model.reference, latents)
    with tiled(model, side):
        expected = decoded(model.reference, latents)
    found = model.decode(latents, 1, tile=side, alike=alike)
    assert relative_error(found, expected) < TOLERANCE
    assert relative_error(whole, expected) > 100 * TOLERANCE  # tiles are not the whole


@pytest.mark.thorough
@pytest.mark.parametrize(("form", "side", "size"), [("plain", 32, (5, 7)), ("patches", 32, (5, 4))])
def test_tiles_of_what_is_encoded(form: str, side: int, size: tuple[int, int]) -> None:
    """diffusers' tiles of the form with patches are of patches: twice the pixels."""
    model = vae22(num_res_blocks=1) if form == "patches" else pair(**PLAIN)
    video = model.draw_video(2, size)
    whole, _ = encoded(model.reference, video)
    with tiled(model, side):
        expected = encoded(model.reference, video)
    for mine, judge in zip(model.encode(video, 1, tile=side), expected, strict=True):
        assert relative_error(mine, judge) < TOLERANCE
    assert relative_error(whole, expected[0]) > 100 * TOLERANCE


def test_a_video_that_fits_into_a_tile_is_whole() -> None:
    model = pair(**PLAIN)
    latents = model.draw_latents(2, (3, 4))
    assert np.array_equal(model.decode(latents, 1, tile=32), model.decode(latents, 1))
