"""The files of a prompt's videos."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.refusals import refuses
from wanrun.media.video_paths import video_paths


def test_several_videos_are_numbered() -> None:
    assert video_paths(Path("a/b.MP4")) == [Path("a/b.MP4")]
    assert video_paths(Path("a/b.gif"), 2) == [Path("a/b-0.gif"), Path("a/b-1.gif")]


@pytest.mark.parametrize("name", ["a", "a.avi", "a.mp4.txt"])
def test_a_suffix_that_is_no_video(name: str) -> None:
    with refuses("unsupported", what=name, expected=".mp4, ", found=Path(name).suffix):
        video_paths(Path(name))
