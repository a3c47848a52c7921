"""Decoders end at a limit, when a token is cancelled, and with their reader."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from PIL import Image

from helpers.pictures import ffmpeg, many_scans
from helpers.refusals import refuses
from wanrun import CancelToken
from wanrun.errors import CancelledError
from wanrun.media import decoder
from wanrun.media.decoder import read_ppm
from wanrun.media.images import read_image
from wanrun.media.read_video import read_video


def long_image(path: Path) -> Path:
    """An image that takes minutes."""
    path.write_bytes(many_scans(Image.new("RGB", (2000, 2000), (10, 200, 30)), 20_000))
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the processes that are started."""
    numbers, begin = list[int](), subprocess.Popen.__init__

    def record(self: subprocess.Popen[bytes], *arguments: object, **options: object) -> None:
        begin(self, *arguments, **options)  # type: ignore[call-overload]
        numbers.append(self.pid)

    monkeypatch.setattr(subprocess.Popen, "__init__", record)
    return numbers


def assert_ended(process: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.slow
def test_an_image_that_takes_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[int]
) -> None:
    monkeypatch.setattr(decoder, "SECONDS", 1)
    with refuses("out_of_range", what="long.jpg", expected="1 s "):
        read_image(long_image(tmp_path / "long.jpg"), "--image")
    assert_ended(started[0])


@pytest.mark.slow
def test_a_program_that_catches_the_signal_takes_too_long_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ffmpeg does."""
    code = "import signal, sys\nsignal.signal(signal.SIGXCPU, lambda *_: sys.exit(255))\nwhile True: pass"
    monkeypatch.setattr(decoder, "SECONDS", 1)
    with decoder.decoder([sys.executable, "-c", code], "--video") as long:
        assert long.line() == b""
        with refuses("out_of_range", what="--video", expected="1 s "):
            long.ended("--video")


def test_a_token_ends_a_decoder(tmp_path: Path, started: list[int]) -> None:
    token = CancelToken()
    threading.Timer(0.1, token.cancel).start()
    with pytest.raises(CancelledError):
        read_image(long_image(tmp_path / "long.jpg"), "--image", cancel=token)
    assert_ended(started[0])
    with pytest.raises(CancelledError):  # one that is cancelled already
        list(read_video(tmp_path / "long.jpg", "--video", cancel=token))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["gif", "mp4"])
def test_a_file_that_takes_much_memory_is_refused(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"large.{suffix}"
    if suffix == "gif":
        Image.new("L", (5000, 5000)).save(path)
    else:
        ffmpeg("-f", "lavfi", "-i", "color=s=2560x1440", "-frames:v", "3", "-preset", "ultrafast", path)
    monkeypatch.setattr(decoder, "BYTES", 60 * 2**20)
    monkeypatch.setattr(decoder, "PIXEL_BYTES", 0)
    with refuses("out_of_memory", what=path, expected="60 MB"):
        list(read_video(path, "--video"))


def test_a_decoder_that_is_killed_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[int]
) -> None:
    """As for want of memory of the whole machine."""
    path = long_image(tmp_path / "long.jpg")

    def kill() -> None:
        while not started:
            time.sleep(0.01)
        os.kill(started[0], 9)

    threading.Thread(target=kill, daemon=True).start()
    with refuses("unreadable", what=path, found="signal 9"):
        read_image(path, "--image")


def test_a_frame_is_not_read_that_is_above_the_limit_or_cut_off() -> None:
    """Whatever ffmpeg makes of its own limit."""
    with refuses("too_large", what="--video"):
        read_ppm(io.BytesIO(b"12000 9000\n255\n"), "--video")
    assert read_ppm(io.BytesIO(b"2 2\n255\n" + bytes(11)), "--video") is None


@pytest.mark.slow
def test_a_package_that_only_this_process_finds_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    monkeypatch.setattr(sys, "executable", "")
    with refuses("not_installed", what="sys.executable"):
        read_image(tmp_path / "a.png", "--image")
    shutil.copytree(Path(decoder.wanrun.__file__).parent, tmp_path / "elsewhere" / "wanrun")
    code = f"""
import sys
sys.path = [p for p in sys.path if "runtime" not in p]
sys.path.insert(0, {str(tmp_path / "elsewhere")!r})
from wanrun.media.images import read_image
assert "elsewhere" in read_image.__code__.co_filename
print(read_image({str(tmp_path / "a.png")!r}, "--image").size)
"""
    monkeypatch.undo()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(4, 4)\n"
