"""The fixed captions on which the tiny checkpoints are measured, and distances between two videos."""

from __future__ import annotations

import numpy as np
from PIL import Image

from tinywan.captions import caption, read_caption
from tinywan.drawing import FRAMES, HEIGHT, WIDTH, draw
from tinywan.scenes import random_scene

SEED = 2026

WINDOW = 7
"""Of SSIM, in pixels."""


def captions(held_out: int = 36, known: int = 28) -> list[tuple[str, bool]]:
    """Returns captions in their usual wording, each with whether it is held out from training.

    Every call returns the same ones, the two kinds in turn, so that a part of them is a mixture too.
    """
    rng = np.random.default_rng(SEED)
    places = [(i / held_out, True) for i in range(held_out)] + [(i / known, False) for i in range(known)]
    return [(caption(random_scene(rng, held_out=new)), new) for _, new in sorted(places)]


def first_frame(text: str, seed: int = 0) -> Image.Image:
    """Draws the first frame that image to video is given with a caption."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(draw(read_caption(text), FRAMES, HEIGHT, WIDTH, rng)[0])


def psnr(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the peak signal-to-noise ratio of uint8 arrays in dB, inf if they are equal."""
    error = np.mean(np.square(found.astype(np.float64) - expected))
    return float(10 * np.log10(255**2 / error)) if error else float("inf")


def ssim(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the structural similarity of two videos, 1 if they are equal.

    The mean over frames of that of luma, with uniform windows and the constants of Wang et al. 2004.

    Args:
        found: uint8 (T, H, W, 3).
        expected: likewise.
    """
    x, y = _luma(found), _luma(expected)
    mean_x, mean_y = _windows(x), _windows(y)
    variance_x = _windows(x * x) - mean_x**2
    variance_y = _windows(y * y) - mean_y**2
    covariance = _windows(x * y) - mean_x * mean_y
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    similar = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    return float(np.mean(similar / ((mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2))))


def gmsd(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the gradient magnitude similarity deviation of two videos, 0 if they are equal.

    A perceptual distance without weights, of Xue et al. 2014: where edges are, how alike they are, and how
    unevenly. The mean over frames.

    Args:
        found: uint8 (T, H, W, 3).
        expected: likewise.
    """
    x, y = (_gradient(_halved(_luma(video))) for video in (found, expected))
    similar = (2 * x * y + 170) / (x * x + y * y + 170)
    return float(np.mean(similar.std((1, 2))))


def _luma(video: np.ndarray) -> np.ndarray:
    return np.asarray(video @ np.array([0.299, 0.587, 0.114]))


def _windows(video: np.ndarray) -> np.ndarray:
    """Returns the mean over every window that fits, (T, H - 6, W - 6)."""
    views = np.lib.stride_tricks.sliding_window_view(video, (WINDOW, WINDOW), (1, 2))
    return np.asarray(views.mean((-1, -2)))


def _halved(video: np.ndarray) -> np.ndarray:
    T, H, W = video.shape
    return np.asarray(video[:, : H // 2 * 2, : W // 2 * 2].reshape(T, H // 2, 2, W // 2, 2).mean((2, 4)))


def _gradient(video: np.ndarray) -> np.ndarray:
    """Returns the size of Prewitt's gradient."""
    views = np.lib.stride_tricks.sliding_window_view(video, (3, 3), (1, 2))
    across = (views[..., 2].sum(-1) - views[..., 0].sum(-1)) / 3
    down = (views[..., 2, :].sum(-1) - views[..., 0, :].sum(-1)) / 3
    return np.asarray(np.hypot(across, down))
