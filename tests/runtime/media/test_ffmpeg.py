"""Which ffmpeg is used, and that one that cannot be used is found before the work."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from helpers.refusals import refuses
from wancli.jobs.output_names import check_encoder
from wanrun.codes import ErrorCode
from wanrun.media import ffmpeg
from wanrun.media.ffmpeg import check_encodes, find_ffmpeg, run_ffmpeg

OWN = imageio_ffmpeg.get_ffmpeg_exe()


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has chosen an ffmpeg."""
    monkeypatch.delenv("IMAGEIO_FFMPEG_EXE", raising=False)


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """imageio's package is not installed."""
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    monkeypatch.delitem(sys.modules, "imageio_ffmpeg.binaries", raising=False)


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def check_refused(code: ErrorCode, found: str, what: str = "mp4") -> None:
    """Checks why no mp4 can be written, and what is said to do."""
    with refuses(code, what=what, found=found, remedy="pip install imageio-ffmpeg") as caught:
        check_encodes(".mp4", "libx264")
    assert "--output" in str(caught.value.remedy) and "\n" not in str(caught.value)


def test_imageios_own_is_found_and_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting it takes 30 ms of every start."""

    def start(*arguments: object, **options: object) -> None:
        raise AssertionError("ffmpeg is started")

    monkeypatch.setattr(ffmpeg.subprocess, "Popen", start)
    assert find_ffmpeg() == OWN
    check_encodes(".mp4", "libx264")
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", OWN)
    check_encodes(".mp4", "libx264")


def test_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").symlink_to(OWN)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in (str(tmp_path / "other"), "other"):
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", name)
        assert find_ffmpeg() == str(tmp_path / "other")
        check_encodes(".mp4", "libx264")  # which encodes a frame with it


@pytest.mark.usefixtures("unpacked")
def test_the_users_choice_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    check_refused("not_installed", "imageio_ffmpeg")
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", OWN)
    assert run_ffmpeg(["-version"]).startswith(b"ffmpeg version")
    check_encodes(".mp4", "libx264")


@pytest.mark.parametrize("name", ["missing", "folder", "text"])
def test_a_choice_that_is_no_program(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("not a program")
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / name))
    check_refused("not_installed", f"IMAGEIO_FFMPEG_EXE={tmp_path / name}")


def test_a_package_without_a_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    """As installed from source: imageio looks for the system's."""
    monkeypatch.setattr(ffmpeg, "_own_binary", lambda: None)
    assert find_ffmpeg() == OWN
    check_encodes(".mp4", "libx264")

    def none() -> str:
        raise RuntimeError("No ffmpeg exe")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", none)
    check_refused("not_installed", "No ffmpeg exe")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("#!/bin/sh\ncat > /dev/null\necho \"Unknown encoder 'libx264'\" >&2\nexit 8\n", "Unknown encoder"),
        ("#!/bin/sh\ncat > /dev/null\nexit 1\n", "exit code 1"),
        ("#!/bin/sh\ncat > /dev/null\nkill -9 $$\n", "signal 9"),
        ("\x7fELF of another machine", "Exec format error"),
    ],
)
def test_a_choice_that_does_not_encode(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(tmp_path / "ffmpeg", text)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", path)
    check_refused("unwritable", reason, what=path)


def test_other_formats_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/nowhere/ffmpeg")
    check_encoder([Path("a.gif"), Path("b.webp"), Path("c.png"), Path("d.npy")])
    with refuses("not_installed", what="mp4"):
        check_encoder([Path("a.gif"), Path("b.MP4")])


@pytest.mark.parametrize("frames", [0, 9])
def test_one_that_hangs(frames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", script(tmp_path / "hangs", "#!/bin/sh\nexec sleep 99\n"))
    monkeypatch.setattr(ffmpeg, "STALLED_SECONDS", 0.1)
    with pytest.raises(OSError, match="nothing for"):
        run_ffmpeg([], [np.zeros((64, 96, 3), np.uint8)] * frames)


def test_a_full_disk_is_told_as_one() -> None:
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", "96x64", "-i", "pipe:0"]
    with pytest.raises(OSError, match="ffmpeg") as caught:
        run_ffmpeg([*source, "-f", "avi", "-y", "/dev/full"], [np.zeros((64, 96, 3), np.uint8)] * 9)
    assert caught.value.errno == errno.ENOSPC
