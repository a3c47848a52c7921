"""Reading videos: every source gives the same frames, within limits, or is refused in one line."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.pictures import (
    ffmpeg,
    many_scans,
    picture,
    pictures,
    pixels,
    same,
    write_folder,
    write_variable,
    write_video,
)
from helpers.refusals import refuses
from helpers.started import Started
from wanrun import CancelToken
from wanrun.artifact.media import VideoSource
from wanrun.codes import ErrorCode
from wanrun.errors import CancelledError, WanError
from wanrun.media import decoder
from wanrun.media.decoder import read_ppm
from wanrun.media.ffmpeg import run_ffmpeg
from wanrun.media.images import read_image
from wanrun.media.read_video import natural_key, read_video

# --- read video ---


def read(source: VideoSource, max_frames: int | None = None) -> list[Image.Image]:
    return list(read_video(source, "--video", max_frames))


def check_refused(source: VideoSource, code: ErrorCode, **parts: object) -> WanError:
    """Checks why a video is not read; returns the error."""
    with refuses(code, **parts) as caught:
        read(source)
    assert "\n" not in str(caught.value) and "--video" in caught.value.what
    return caught.value


def animated(frames: list[Image.Image], path: Path, **options: Any) -> Path:
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=80, **options)
    return path


def test_a_folder_and_a_list_give_the_same_frames(tmp_path: Path) -> None:
    frames = pictures(12, 40, 24)  # frame10 comes after frame9, not after frame1
    folder = write_folder(frames, tmp_path / "frames")
    (folder / ".DS_Store").write_bytes(b"not a frame")
    for source in (folder, str(folder), frames, tuple(frames)):
        found = read(source)
        assert len(found) == 12 and all(map(same, found, frames))


@pytest.mark.parametrize(
    "names",
    [
        ["9", "10", "a", "a09", "a9", "a9b2", "a9b10", "a10", "b1"],
        ["a1", "a٣", "frame1²3.png", "frame1²10.png", "²", "٣"],  # digits of other scripts are text
    ],
)
def test_names_are_sorted_by_their_numbers(names: list[str]) -> None:
    given = sorted(names, reverse=True)
    assert given != names and sorted(given, key=natural_key) == names


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "options"), [("webp", {"lossless": True}), ("png", {}), ("gif", {})])
def test_animations_are_read(suffix: str, options: dict[str, Any], tmp_path: Path) -> None:
    frames = pictures(5, 40, 24)
    found = read(animated(frames, tmp_path / f"animated.{suffix}", **options))
    assert len(found) == 5 and all(frame.mode == "RGB" for frame in found)
    if suffix == "gif":  # 256 colours
        for frame, expected in zip(found, frames, strict=True):
            assert np.abs(np.asarray(frame, int) - np.asarray(expected)).mean() < 16
    else:
        assert all(map(same, found, frames))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi"])
def test_videos_are_read(suffix: str, tmp_path: Path) -> None:
    frames = [Image.fromarray(pixels(64, 48, index) // 2 + 64) for index in range(5)]
    options = ("-c:v", "libx264", "-qp", "4", "-pix_fmt", "yuv420p")
    path = write_video(frames, tmp_path / f"video.{suffix}", *options)
    path = path.rename(tmp_path / "any name%03d: [x]")  # the content says what it is
    for frame, expected in zip(read(path), frames, strict=True):
        assert np.abs(np.asarray(frame, int) - np.asarray(expected)).mean() < 16  # half the colour is kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "codec"),
    [
        ("webm", ("libvpx-vp9", "-pix_fmt", "yuva420p", "-metadata", "title=Video: a mask")),
        ("webm", ("libvpx", "-auto-alt-ref", "0", "-pix_fmt", "yuva420p")),
        ("mov", ("prores_ks", "-profile:v", "4444", "-pix_fmt", "yuva444p10le")),
        ("mp4", ("libx264", "-pix_fmt", "yuv420p")),
    ],
)
def test_a_mask_that_is_drawn_as_transparency(suffix: str, codec: tuple[str, ...], tmp_path: Path) -> None:
    """White paint on a transparent layer; what has no transparency is read by its colours."""
    path = tmp_path / f"mask.{suffix}"
    transparent = suffix != "mp4"
    layers = np.full((3, 32, 64, 4), 255 if transparent else 0, np.uint8)
    layers[..., 3] = 0 if transparent else 255
    layers[:, :16] = 255
    source = ("-f", "rawvideo", "-pix_fmt", "rgba", "-s", "64x32", "-i", "pipe:0")
    run_ffmpeg([*source, "-c:v", *codec, str(path)], layers)
    frames = [np.asarray(frame) for frame in read_video(path, "--mask", mask=True)]
    assert len(frames) == 3
    for frame in frames:
        assert frame.shape == (32, 64, 3) and frame[:14].min() > 250 and frame[18:].max() < 5
    limited = list(read_video(path, "--mask", 2, mask=True))
    assert len(limited) == 2
    if transparent:  # of a video that is no mask the colours count
        assert np.asarray(next(iter(read_video(path, "--video"))))[18:].min() > 200


def test_a_still_image_is_a_video_of_one_frame(tmp_path: Path) -> None:
    picture(40, 24).save(tmp_path / "still.png")
    (found,) = read(tmp_path / "still.png")
    assert same(found, picture(40, 24))


@pytest.mark.slow
def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    frames = pictures(6, 40, 24)
    folder = write_folder(frames, tmp_path / "frames")
    (folder / "frame4.png").write_bytes(b"is not looked at")
    sources = [
        folder,
        frames,
        write_video(frames, tmp_path / "video.mp4"),
        animated(frames, tmp_path / "animated.webp"),
    ]
    for source in sources:
        assert len(read(source, 3)) == 3


def test_a_variable_rate_is_evened_out(tmp_path: Path) -> None:
    """Frames of 0.1 and 0.3 s: the second is shown three times as long."""
    path = write_variable(pictures(4, 64, 48), tmp_path / "variable.mp4", [0.1, 0.3, 0.1, 0.3])
    assert len(read(path)) > 7


def test_ffmpeg_is_ended_with_the_reader(tmp_path: Path, started: Started) -> None:
    frames = pictures(10, 320, 240)  # more than a pipe holds
    path = write_video(frames, tmp_path / "video.mkv", "-c:v", "libx264", "-preset", "ultrafast")
    started.clear()
    reader = read_video(path, "--video")
    next(reader)
    pillow, process = started
    assert pillow.returncode is not None
    assert process.poll() is None
    reader.close()  # type: ignore[attr-defined]
    assert process.returncode is not None


@pytest.mark.slow
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    """The reference gives what is there; where the index is in front it does not notice."""
    frames = pictures(12, 64, 48)
    for name, options in {
        "cut.mp4": ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-movflags", "+faststart"),
        "cut.mkv": ("-c:v", "libx264", "-pix_fmt", "yuv420p"),
        "cut.avi": ("-c:v", "mpeg4"),
    }.items():
        path = write_video(frames, tmp_path / name, *options)
        for part in (0.95, 0.6, 0.1):
            path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
            wrong = check_refused(path, "damaged", what=path, found="ffmpeg: ", remedy="encode it again")
            assert "0x" not in str(wrong.found)  # ffmpeg's addresses
    for name in ("cut.gif", "cut.webp", "cut.png"):
        path = animated(frames, tmp_path / name)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        check_refused(path, "damaged", what=path)


def test_what_is_no_video_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("not a video\n" * 99)
    (tmp_path / "nothing").mkdir()
    ffmpeg("-f", "lavfi", "-i", "sine=duration=1", tmp_path / "sound.m4a")
    check_refused(tmp_path / "empty.mp4", "unreadable", found="empty")
    check_refused(tmp_path / "text.mp4", "damaged", found="ffmpeg: ")
    check_refused(tmp_path / "sound.m4a", "damaged", found="ffmpeg: ")
    check_refused(tmp_path / "missing.mp4", "missing_file", what=tmp_path / "missing.mp4")
    for nothing in (tmp_path / "nothing", []):
        assert check_refused(nothing, "damaged", expected="a folder").found is None


def test_a_playlist_does_not_open_other_files(tmp_path: Path) -> None:
    write_video(pictures(3, 64, 48), tmp_path / "other.mp4")
    (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile other.mp4\n")
    check_refused(tmp_path / "list.mp4", "damaged", found="whitelist")


def test_a_folder_with_anything_else_is_refused(tmp_path: Path) -> None:
    folder = write_folder(pictures(3, 40, 24), tmp_path / "frames")
    (folder / "notes.txt").write_text("cut at 3")
    check_refused(folder, "wrong_kind", what=folder / "notes.txt")
    (folder / "notes.txt").unlink()
    (folder / "more").mkdir()
    check_refused(folder, "wrong_kind", what=folder / "more", found="a folder")


def test_frames_of_several_sizes_are_refused(tmp_path: Path) -> None:
    frames = [*pictures(2, 40, 24), picture(40, 32)]
    for source in (frames, write_folder(frames, tmp_path / "frames")):
        wrong = check_refused(source, "mismatch", expected="40x24", found="40x32")
        assert str(wrong.found).endswith(" 3")


def test_deep_frames_are_refused(tmp_path: Path) -> None:
    folder = write_folder(pictures(2, 20, 12), tmp_path / "frames")
    deep = np.random.default_rng(0).integers(0, 65536, (12, 20), np.uint16)
    Image.fromarray(deep).save(folder / "frame1.png")
    check_refused(folder, "unsupported", what=folder / "frame1.png", remedy="8 bits")
    Image.fromarray(deep).save(tmp_path / "deep.png")
    check_refused(tmp_path / "deep.png", "unsupported", remedy="8 bits")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["avi", "mp4", "gif"])
def test_frames_above_the_limit_of_size_are_refused(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_video(pictures(3, 320, 240), tmp_path / f"large.{suffix}")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 320 * 240)
    assert len(read(path)) == 3
    for limit in (320 * 240 - 1, 320 * 240 // 20):  # it decodes the first
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        check_refused(path, "too_large", what=path, expected=f"{limit} pixels")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert len(read(path)) == 3


def test_ffmpeg_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_video(pictures(3, 64, 48), tmp_path / "video.mp4")
    program = tmp_path / "ffmpeg"
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
    found, remedy = f"IMAGEIO_FFMPEG_EXE={program}", "pip install imageio-ffmpeg"
    check_refused(path, "not_installed", what=path, found=found, remedy=remedy)
    program.write_bytes(b"\x7fELF of another machine")
    program.chmod(0o755)
    check_refused(path, "unreadable", what=program, found="Exec format error")
    monkeypatch.undo()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(decoder.tempfile, "TemporaryFile", full)
    with pytest.raises(OSError, match="No space left"):  # which ends a run with the exit code of a full disk
        read(path)


# --- decoder ---


def long_image(path: Path) -> Path:
    """An image that takes minutes."""
    path.write_bytes(many_scans(Image.new("RGB", (2000, 2000), (10, 200, 30)), 20_000))
    return path


def assert_ended(process: subprocess.Popen[bytes]) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.mark.slow
def test_an_image_that_takes_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
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


def test_a_token_ends_a_decoder(tmp_path: Path, started: Started) -> None:
    token = CancelToken()
    started.then = lambda _: threading.Timer(0.1, token.cancel).start()
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


def test_a_decoder_that_is_killed_says_how(tmp_path: Path, started: Started) -> None:
    """As for want of memory of the whole machine."""
    path = long_image(tmp_path / "long.jpg")
    started.then = subprocess.Popen.kill
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
