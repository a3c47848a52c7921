"""The windows of a video of text alone: which there are, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wanrun.errors import UsageError
from wanrun.request.resolve import resolve


def test_windows_are_recorded_and_counted(toy_artifact: Path) -> None:
    generation = resolve(toy_artifact, "a fox", num_frames=33, window_frames=9, num_steps=2)
    facts = {name: generation.options[name] for name in ("num_frames", "window_frames", "window_overlap")}
    assert facts == {"num_frames": 33, "window_frames": 9, "window_overlap": 4}
    assert generation.latents_shape[2] == 9 and generation.cost().windows == 4
    assert generation.cost().steps == 8 and generation.cost().frames == 33


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_frames": 16, "window_frames": 9}, "num_frames"),
        ({"num_frames": 5, "window_frames": 9}, "num_frames"),
        ({"num_frames": 90_001, "window_frames": 9}, "num_frames"),
        ({"num_frames": 17, "window_frames": 8}, "window_frames"),
        ({"num_frames": 17, "window_overlap": 3}, "window"),
        ({"num_frames": 17, "window_overlap": 12}, "window"),
        ({"window_overlap": 4}, "window_overlap"),
    ],
)
def test_what_windows_do_not_make(toy_artifact: Path, options: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve(toy_artifact, "a fox", **options)
    assert word in str(error.value)
