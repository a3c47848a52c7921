"""Videos in all formats that wanrun writes: which are embedded, and the frames of their contact sheets."""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.refusals import refuses
from wanreport import pictures
from wanreport.report import Picture
from wanrun.errors import UsageError
from wanrun.media.write_video import write_video

COUNT = 7
FRAMES = np.repeat(np.arange(COUNT, dtype=np.uint8), 32 * 48 * 3).reshape(COUNT, 32, 48, 3) * 36
"""Each frame is a grey of its own."""


def opened(picture: Picture) -> Image.Image:
    kind, _, data = picture.uri.partition(",")
    assert kind == "data:image/webp;base64"
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert image.size == (picture.width, picture.height)
    return image


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".webm", ".gif", ".webp", ".png", ".npy", ".frames"])
def test_every_format(tmp_path: Path, suffix: str) -> None:
    video = tmp_path / f"a{suffix}"
    write_video(FRAMES, video, 8.0, {"prompt": "a fox"})
    frames = pictures.frames_of(video)
    greys = [float(np.asarray(frame.convert("L")).mean()) for frame in frames]
    assert greys == pytest.approx([36.0 * index for index in range(COUNT)], abs=4)
    clip, note = pictures.clip(video, 1 << 20)
    if suffix in pictures.PLAYED:
        assert clip is not None and note == ""
        kind, _, data = clip.uri.partition(",")
        assert (
            kind == f"data:{pictures.PLAYED[suffix]};base64" and base64.b64decode(data) == video.read_bytes()
        )
        assert clip.animated == kind.startswith("data:image/")
    else:
        assert clip is None and f" {suffix}" in note


def test_a_contact_sheet_has_the_first_and_the_last_frame() -> None:
    sheet = opened(pictures.sheet(pictures.images(FRAMES)))
    assert sheet.width <= pictures.SHEET_WIDTH + 100
    wide, high = sheet.width / 3, sheet.height / 2
    centres = [((column + 0.5) * wide, (row + 0.5) * high) for row in range(2) for column in range(3)]
    greys = [sheet.convert("L").getpixel((int(x), int(y))) for x, y in centres]
    expected = [36 * index for index in (0, 1, 2, 4, 5, 6)]
    assert greys == pytest.approx(expected, abs=6)
    one = opened(pictures.sheet(pictures.images(FRAMES[:1])))
    assert one.height == pytest.approx(one.width * 32 / 48, abs=1)
    small = opened(pictures.still(pictures.images(FRAMES)[3], pictures.THUMBNAIL))
    assert small.width == pictures.THUMBNAIL and small.convert("L").getpixel((5, 5)) == pytest.approx(
        108, abs=4
    )


def test_large_videos_are_not_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    video = tmp_path / "a.gif"
    write_video(FRAMES, video, 8.0, {})
    size = video.stat().st_size
    assert pictures.clip(video, size)[0] is not None
    clip, note = pictures.clip(video, size - 1)
    assert clip is None and "too large" in note
    monkeypatch.setattr(pictures, "CLIP_BYTES", size - 1)
    assert pictures.clip(video, 1 << 30)[0] is None


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.npy", "a.png"])
@pytest.mark.parametrize("there", [False, True])
def test_what_is_no_video_is_one_line(tmp_path: Path, name: str, there: bool) -> None:
    if there:
        (tmp_path / name).write_bytes(b"no video")
    with refuses("unreadable", what=tmp_path / name) as caught:
        pictures.frames_of(tmp_path / name)
    assert caught.value.found
    if there:
        assert pictures.digest(tmp_path / name) == (8, hashlib.sha256(b"no video").hexdigest())
        return
    for read in (
        lambda: pictures.clip(tmp_path / "a.mp4", 1 << 20),
        lambda: pictures.digest(tmp_path / name),
    ):
        with refuses("unreadable", what=tmp_path, found=os.strerror(errno.ENOENT)):
            read()


def test_without_ffmpeg_it_is_one_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(FRAMES, tmp_path / "a.mp4", 8.0, {})

    def missing() -> str:
        raise RuntimeError("no ffmpeg")

    monkeypatch.setattr(pictures.imageio_ffmpeg, "get_ffmpeg_exe", missing)
    with refuses("unreadable", what=tmp_path / "a.mp4", found="no ffmpeg"):
        pictures.frames_of(tmp_path / "a.mp4")


def test_a_folder_without_frames(tmp_path: Path) -> None:
    (tmp_path / "a.frames").mkdir()
    with pytest.raises(UsageError, match="found no frame"):
        pictures.frames_of(tmp_path / "a.frames")
