"""Stages of a chunk: what lies between them. Their tables are in tests/parity/test_helios.py."""

from __future__ import annotations

import numpy as np
import pytest

from wanrun.denoising.noise import Noise
from wanrun.denoising.pyramid import block_noise, chunk_table, enlarged, halved
from wanrun.errors import UsageError

SHAPE = (1, 8, 3, 16, 24)


@pytest.mark.parametrize("gamma", [1 / 3, 0.2])
def test_noise_of_a_stage_is_as_good_as_new(gamma: float) -> None:
    """Enlarged noise and block noise have together the variance of noise, and no covariance in a block."""
    draw = Noise(3)
    _, start, _ = chunk_table("unipc", (2, 1, 1), 432, gamma=gamma).starts
    assert start.step == 2
    level = start.noise * np.sqrt(gamma) / start.kept  # of the noise at which the stage begins
    found = enlarged(np.float32(level) * draw((*SHAPE[:-2], 8, 12)), start, draw, gamma)
    blocks = np.swapaxes(found.reshape(*SHAPE[:-2], 8, 2, 12, 2), -3, -2).reshape(-1, 4)
    assert found.shape == SHAPE and found.dtype == np.float32
    covariance = np.cov(blocks.T) / np.var(blocks)
    assert np.abs(covariance - np.eye(4)).max() < 0.06  # seen: 0.03, of 2 304 blocks


def test_block_noise_at_the_published_gamma() -> None:
    """A block's values are nearly a sum of 0: the last of them is not drawn freely."""
    noise = block_noise(Noise(4), SHAPE)
    assert abs(noise.var() - 1) < 0.05
    assert np.abs(noise.reshape(*SHAPE[:-2], 8, 2, 12, 2).sum(axis=(-3, -1))).max() < 2e-4 * 5


def test_halved_noise_is_noise() -> None:
    half = halved(Noise(5)(SHAPE))
    assert half.shape == (*SHAPE[:-2], 8, 12) and half.dtype == np.float32
    assert abs(half.var() - 1) < 0.06


@pytest.mark.parametrize(
    ("solver", "steps", "found"), [("lcm", (2, 2), "'lcm'"), ("dmd", (2, 0, 2), "at least 1; found 0")]
)
def test_what_has_no_steps(solver: str, steps: tuple[int, ...], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        chunk_table(solver, steps, 432)
