"""Distances of videos, and intervals of their means."""

from __future__ import annotations

import numpy as np
import pytest

from wanbuild.calibrate.judge import MOST_DB, Mean, mean_of, psnr


def test_psnr() -> None:
    frames = np.full((2, 3, 4, 4, 3), 100, np.uint8)
    assert psnr(frames, frames) == MOST_DB
    assert psnr(frames, frames + 5) == pytest.approx(20 * np.log10(255 / 5))
    assert psnr(np.zeros_like(frames), np.full_like(frames, 255)) == 0


def test_a_mean_and_its_interval() -> None:
    values = np.random.default_rng(3).normal(5, 2, 40)
    found = mean_of(values)
    assert found == mean_of(list(values)) and found.value == pytest.approx(values.mean())
    # Of 40 values with this deviation: 1.645 standard errors each way.
    width = 1.645 * values.std() / np.sqrt(40)
    assert found.high - found.value == pytest.approx(width, rel=0.1)
    assert found.value - found.low == pytest.approx(width, rel=0.1)
    assert mean_of([3.0]) == Mean(3.0, 3.0, 3.0) and str(mean_of([3.0])) == "3.0 (3.0 to 3.0)"
