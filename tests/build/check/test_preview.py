"""The map from latents to colours, fitted to decoders that are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from helpers.manifests import plain_manifest
from wanbuild.check.preview import fitted

MAP = np.random.default_rng(1).normal(0, 20, (16, 3))
GREY = np.array([100.0, 120.0, 140.0])


class Linear:
    """A pipeline whose decoder is linear: a cell of 8x8 pixels has one colour, a latent frame four frames."""

    def __init__(self, frames: int, height: int, width: int) -> None:
        self.latents_shape = (1, 16, frames, height, width)
        self.manifest, self.profile = plain_manifest(), SimpleNamespace(num_references=0)
        self.decoded = 0

    def decode(self, latents: np.ndarray) -> np.ndarray:
        self.decoded += 1
        colours = np.moveaxis(latents[0], 0, -1) @ MAP + GREY
        each = colours.repeat(8, 1).repeat(8, 2)
        noise = np.random.default_rng(self.decoded).normal(0, 2, each.shape)
        return np.concatenate([each[:1], (each + noise)[1:].repeat(4, 0)])[None]


@pytest.mark.parametrize("shape", [(1, 4, 6), (3, 9, 5), (6, 30, 52)])
def test_the_fit_finds_it(shape: tuple[int, int, int]) -> None:
    """As many decodings as the squares need."""
    pipeline = Linear(*shape)
    *rows, grey = np.array(fitted(cast(Any, pipeline)))
    np.testing.assert_allclose(rows, MAP, rtol=0.01, atol=0.3)
    np.testing.assert_allclose(grey, GREY, rtol=0, atol=0.3)
    squares = shape[0] * -(-shape[1] // 4) * -(-shape[2] // 4)
    assert (pipeline.decoded - 1) * squares < 20 * 17 <= pipeline.decoded * squares
