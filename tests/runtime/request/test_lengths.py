"""The frames of so many seconds, and those of a live video."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.manifests import plain_model, with_model
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.model import Chunking
from wanrun.errors import UsageError
from wanrun.request.lengths import check_live, length_of


@pytest.mark.parametrize(
    ("seconds", "fps", "frames"),
    [(5, 16, 81), (1.1, 16, 17), (1.2, 16, 21), (0.01, 16, 1), (3, 1, 5), (5, 24, 121), (5.0625, 16, 81)],
)
def test_seconds_are_the_nearest_frames(seconds: float, fps: float, frames: int) -> None:
    assert length_of(plain_model(vae_temporal=4), seconds, fps) == frames


@pytest.mark.parametrize(
    ("frames", "decoder", "named"),
    [
        (None, None, None),
        (9, "full", None),
        (10, None, "num_frames"),
        (0, None, "num_frames"),
        (True, None, "num_frames"),
        (9.0, None, "num_frames"),
        (9, "tiny", "decoder"),
    ],
)
def test_a_live_video(toy_artifact: Path, frames: Any, decoder: str | None, named: str | None) -> None:
    once = read_manifest(toy_artifact)
    with pytest.raises(UsageError, match=once.model.variant):
        check_live(once, frames, "num_frames", decoder)
    chunked = with_model(once, chunks=Chunking(first=1, each=3))
    fields: tuple[str | None, ...] = (None,)
    try:
        check_live(chunked, frames, "num_frames", decoder)
    except UsageError as error:
        fields = error.fields
    assert fields == (named,)
