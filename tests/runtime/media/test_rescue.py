"""Frames whose video cannot be written are kept where there is room."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import numpy as np
import pytest

from wanrun.errors import NoSpaceError, UsageError
from wanrun.media.write_video import AppearedError, rescued

FRAMES = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)


def test_frames_are_kept_beside_the_video(tmp_path: Path) -> None:
    with pytest.raises(NoSpaceError) as caught, rescued(FRAMES, tmp_path / "cat.mp4"):
        raise NoSpaceError("there is no space left to write cat.mp4", remedy="free some")
    kept = re.fullmatch(
        r"there is no space left to write cat\.mp4; its frames are kept in (.*); free some", str(caught.value)
    )
    assert kept is not None
    (path,) = tmp_path.iterdir()
    assert str(path) == kept[1] and re.fullmatch(r"cat-[0-9a-f]{8}\.npy", path.name)
    assert np.array_equal(np.load(path), FRAMES)


def test_without_its_folder_they_are_in_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with (
        pytest.raises(UsageError, match=f"its frames are kept in {tmp_path}/cat-"),
        rescued(FRAMES, tmp_path / "gone" / "cat.mp4"),
    ):
        raise UsageError("cat.mp4 cannot be written")
    (path,) = tmp_path.iterdir()
    assert np.array_equal(np.load(path), FRAMES)


def test_where_there_is_room_nowhere_the_error_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with (
        pytest.raises(UsageError, match=r"^cat.mp4 cannot be written$"),
        rescued(FRAMES, tmp_path / "gone" / "cat.mp4"),
    ):
        raise UsageError("cat.mp4 cannot be written")


def test_a_video_under_another_name_is_enough(tmp_path: Path) -> None:
    with pytest.raises(AppearedError, match=r"cat.mp4 appeared"), rescued(FRAMES, tmp_path / "cat.mp4"):
        raise AppearedError("cat.mp4 appeared while the video was made")
    assert list(tmp_path.iterdir()) == []


def test_a_video_that_is_written_leaves_nothing_else(tmp_path: Path) -> None:
    with rescued(FRAMES, tmp_path / "cat.mp4"):
        pass
    assert list(tmp_path.iterdir()) == []
