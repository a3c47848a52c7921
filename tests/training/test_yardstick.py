"""The captions and distances of the yardstick."""

from __future__ import annotations

import numpy as np
import pytest
from tinywan.captions import read_caption
from tinywan.drawing import draw
from tinywan.yardstick import captions, gmsd, psnr, ssim

VIDEO = draw(read_caption("a red star grows on checked grey ground"), 5, 64, 96, np.random.default_rng(0))


@pytest.mark.thorough
def test_captions_are_fixed_and_mixed() -> None:
    texts = captions()
    assert texts == captions()
    assert len({text for text, _ in texts}) == 64
    assert all(read_caption(text).held_out == new for text, new in texts)
    for part in (texts[:16], texts):
        assert 0.5 <= sum(new for _, new in part) / len(part) <= 0.6


def test_equal_videos_have_no_distance() -> None:
    assert (psnr(VIDEO, VIDEO), gmsd(VIDEO, VIDEO)) == (float("inf"), 0)
    assert ssim(VIDEO, VIDEO) == pytest.approx(1, abs=1e-12)


def test_psnr_of_a_known_error() -> None:
    found, expected = (np.full((2, 3), value, np.uint8) for value in (100, 110))
    assert psnr(found, expected) == pytest.approx(28.1308, abs=1e-4)


def test_ssim_of_flat_frames() -> None:
    """Without variance it is the term of the means alone."""
    flat = [np.full((1, 16, 16, 3), value, np.uint8) for value in (50, 100)]
    c1 = (0.01 * 255) ** 2
    assert ssim(*flat) == pytest.approx((2 * 50 * 100 + c1) / (50**2 + 100**2 + c1))


def test_distances_order_what_is_seen() -> None:
    """Brighter frames have a larger error than noisy ones, and all their edges."""
    rng = np.random.default_rng(1)
    noisy = np.clip(VIDEO + rng.normal(0, 6, VIDEO.shape), 0, 255).astype(np.uint8)
    noisier = np.clip(VIDEO + rng.normal(0, 25, VIDEO.shape), 0, 255).astype(np.uint8)
    moved = np.roll(VIDEO, 8, 2)
    assert gmsd(noisy, VIDEO) < 0.5 * min(gmsd(noisier, VIDEO), gmsd(moved, VIDEO))
    assert ssim(noisy, VIDEO) > ssim(noisier, VIDEO)
    brighter = np.clip(VIDEO.astype(int) + 12, 0, 255).astype(np.uint8)
    assert psnr(brighter, VIDEO) < psnr(noisy, VIDEO)
    assert gmsd(brighter, VIDEO) < gmsd(noisy, VIDEO)
