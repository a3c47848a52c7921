"""Writing videos: every format round trips, atomically and with the same bytes each time."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image, ImageSequence

from helpers.refusals import refuses
from wanrun.errors import NoSpaceError, UsageError
from wanrun.media import write_video as video
from wanrun.media.video_paths import CODECS, video_paths
from wanrun.media.video_paths import SUFFIXES as KNOWN
from wanrun.media.write_video import read_metadata, write_pieces, write_video

# --- write video ---


SUFFIXES = [suffix for suffix in KNOWN if suffix != ".frames"]


METADATA = {
    "prompt": "A \"cat\" at C:\\dir;\n# a=b\t猫が歩く 🐈 'quoted' %d {x}",
    "odd argv": "\udcff",
    "seed": 2**64 - 1,
    "guidance_scale": 3.5,
    "image": None,
    "nested": {"steps": [1, 2]},
}


def clip(num_frames: int = 9, height: int = 48, width: int = 80, seed: int = 0) -> np.ndarray:
    """A smooth moving pattern in saturated colours, with a little noise."""
    random = np.random.default_rng(seed)
    t, y, x, c = np.ogrid[:num_frames, :height, :width, :3]
    phase = random.uniform(0, 6, 3)[c]
    wave = np.sin(x / 23 + t / 3 + phase) * np.cos(y / 19 - t / 4 + 2 * phase)
    noisy = 127 + 120 * wave + random.normal(0, 1, (num_frames, height, width, 3))
    return np.clip(noisy, 0, 255).astype(np.uint8)


def read_frames(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix in CODECS:
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path)]
        raw = subprocess.run(
            [*command, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], capture_output=True, check=True
        )
        return np.frombuffer(raw.stdout, np.uint8).reshape(-1, *clip().shape[1:])
    with Image.open(path) as image:
        return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / np.mean((a.astype(float) - b) ** 2)))


# 37.7 dB (mp4, mostly halved chroma), 33.4 (gif: 256 colours, dithered) and 41.3 (webp) were seen. A wrong
# colour matrix or range gives mp4 29 to 30 dB.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "least_psnr"), [(".mp4", 35), (".mov", 35), (".webm", 33), (".gif", 30), (".webp", 38)]
)
def test_lossy_formats_keep_frames_and_colours(tmp_path: Path, suffix: str, least_psnr: float) -> None:
    frames, path = clip(), tmp_path / f"out{suffix}"
    write_video(frames, path, 16, METADATA)
    got = read_frames(path)
    assert got.shape == frames.shape
    assert psnr(got, frames) > least_psnr
    # In the right order, not only alike: each frame is nearest to its own source.
    distance = ((got[:, None].astype(float) - frames[None]) ** 2).mean(axis=(2, 3, 4))
    assert distance.argmin(axis=1).tolist() == list(range(len(frames)))


@pytest.mark.parametrize("num_frames", [1, 5])
@pytest.mark.parametrize("suffix", [".png", ".npy"])
def test_lossless_formats_keep_every_bit(tmp_path: Path, suffix: str, num_frames: int) -> None:
    frames = np.random.default_rng(1).integers(0, 256, (num_frames, 18, 31, 3), dtype=np.uint8)
    path = tmp_path / f"out{suffix}"
    write_video(frames, path, 24, METADATA)
    np.testing.assert_array_equal(read_frames(path), frames)


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    """Every bit is kept, metadata is beside it, and what is there is not replaced."""
    frames, path = clip(num_frames=11), tmp_path / "shot.frames"
    write_video(frames, path, 16, METADATA)
    assert read_metadata(path) == METADATA
    pictures = sorted(path.iterdir())
    assert [picture.name for picture in pictures] == [f"{number:04}.png" for number in range(1, 12)]
    np.testing.assert_array_equal(np.stack([np.asarray(Image.open(picture)) for picture in pictures]), frames)
    assert {file.name for file in tmp_path.iterdir()} == {"shot.frames", "shot.frames.json"}
    (path / "mine.txt").write_text("mine")
    with refuses("unwritable", what="shot.frames", remedy="--output"):
        write_video(clip(), path, 16, {})
    assert len([*path.iterdir()]) == 12 and read_metadata(path) == METADATA
    assert {file.name for file in tmp_path.iterdir()} == {"shot.frames", "shot.frames.json"}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_metadata_round_trips_and_bytes_repeat(tmp_path: Path, suffix: str) -> None:
    """Also of frames that do not lie in one piece; what is written over a file has nothing of it."""
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    frames = clip()[:, ::-1, ::-1]
    write_video(frames, first, 16, METADATA)
    write_video(frames.copy(), second, 16, METADATA)
    assert read_metadata(first) == read_metadata(second) == METADATA
    assert first.read_bytes() == second.read_bytes()
    write_video(clip(seed=1), second, 16, {"seed": 2})
    assert read_metadata(second) == {"seed": 2} and second.read_bytes() != first.read_bytes()
    beside = {"a.npy.json", "b.npy.json"} if suffix == ".npy" else set()
    assert {file.name for file in tmp_path.iterdir()} == {f"a{suffix}", f"b{suffix}"} | beside


def test_metadata_that_json_cannot_hold_becomes_text(tmp_path: Path) -> None:
    for suffix in (".png", ".npy"):
        given = MappingProxyType({"image": Path("a.png"), "prompt": "猫"})
        write_video(clip(2), tmp_path / f"a{suffix}", 16, given)
        assert read_metadata(tmp_path / f"a{suffix}") == {"image": "a.png", "prompt": "猫"}
    lines = (tmp_path / "a.npy.json").read_text(encoding="utf-8").splitlines()
    assert lines == ["{", '  "image": "a.png",', '  "prompt": "猫"', "}"]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".gif", ".webp", ".png"])
def test_metadata_too_long_for_the_file_goes_beside_it(tmp_path: Path, suffix: str) -> None:
    path, long = tmp_path / f"a{suffix}", {"prompt": "word " * 40_000}
    write_video(clip(2), path, 16, long)
    assert json.loads((tmp_path / f"a{suffix}.json").read_text()) == long
    assert read_metadata(path) == long
    write_video(clip(2), path, 16, METADATA)  # what is in the file comes before a stale sidecar
    assert read_metadata(path) == METADATA


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".png"])
def test_durations_do_not_drift(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    write_video(clip(33, 16, 16), path, 16, {})
    with Image.open(path) as image:
        total = 0.0
        for frame in ImageSequence.Iterator(image):
            frame.load()
            total += frame.info["duration"]
    assert abs(total - 33 * 62.5) <= 10  # one unit of GIF's clock


@pytest.mark.slow
@pytest.mark.parametrize("fps", [16, 24.0, 23.976, 30])
def test_mp4_stream(tmp_path: Path, fps: float) -> None:
    path = tmp_path / "a.mp4"
    write_video(clip(8), path, fps, {})
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "null", "-"]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (stream,) = (line for line in log.split("Output")[0].splitlines() if "Video:" in line)
    assert "h264" in stream
    assert "yuv420p(tv, bt709, " in stream  # else it names matrix, primaries and transfer apart
    assert "80x48" in stream
    assert f" {round(fps, 2):g} fps" in stream
    assert read_metadata(path) == {}


@pytest.mark.parametrize(
    ("raised", "kind", "code"),
    [
        *((OSError(number, os.strerror(number)), NoSpaceError, 4) for number in (errno.ENOSPC, errno.EDQUOT)),
        (OSError(errno.EFBIG, "too large"), NoSpaceError, 4),
        (OSError(errno.EACCES, "denied"), UsageError, 2),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (RuntimeError("bug"), RuntimeError, None),
    ],
)
@pytest.mark.parametrize("suffix", [".mp4", ".gif", ".npy"])  # by ffmpeg, Pillow, and here
def test_a_failure_leaves_the_old_file_and_no_other(
    suffix: str, raised: BaseException, kind: type[BaseException], code: int | None, tmp_path: Path
) -> None:
    def fail() -> Iterator[np.ndarray]:
        yield clip()[:4]
        raise raised

    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"old")
    with pytest.raises(kind) as caught:
        write_pieces(fail(), clip().shape, path, 16, METADATA)
    assert getattr(caught.value, "exit_code", None) == code
    assert kind is not NoSpaceError or path.name in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("suffix", [".mp4", ".npy"])
def test_a_file_that_is_too_large_for_its_place(suffix: str, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with refuses("no_space", NoSpaceError, what=f"a{suffix}", remedy="ulimit -f"):
            write_video(clip(), tmp_path / f"a{suffix}", 16, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_ffmpeg_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "YUV", ("-vf", "no_such_filter"))
    with refuses("unwritable", what="a.mp4", found="ffmpeg: ") as caught:
        write_video(clip(), tmp_path / "a.mp4", 16, {})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupt_ends_ffmpeg_and_removes_the_half_file(tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches the whole process group while ffmpeg is writing."""
    script = f"""
import sys, numpy as np
from pathlib import Path
from wanrun.media.write_video import write_pieces
frames = np.random.default_rng(0).integers(0, 256, (30, 512, 512, 3), dtype=np.uint8)
def pieces():
    yield frames
    print("ready", flush=True)
    while True:
        yield frames
try:
    write_pieces(pieces(), frames.shape, Path({str(tmp_path / "a.mp4")!r}), 16, {{}})
except KeyboardInterrupt:
    sys.exit(130)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
        assert [file.suffix for file in tmp_path.iterdir()] == [".mp4"]  # the temporary one
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 130
    assert list(tmp_path.iterdir()) == []


def test_no_moment_shows_a_video_with_another_ones_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may end between the two files: a new video comes last, a replaced one first."""
    path, seen = tmp_path / "a.npy", []
    write = video.replace_file

    def observed(sidecar: Path, data: bytes) -> None:
        seen.append(np.load(path)[0, 0, 0, 0] if path.exists() else None)
        write(sidecar, data)

    monkeypatch.setattr(video, "replace_file", observed)
    for value in (1, 2):
        write_video(np.full((2, 4, 4, 3), value, np.uint8), path, 16, {"value": value})
        assert read_metadata(path) == {"value": value}
    assert seen == [None, 2]


def test_relative_and_odd_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("plain.mp4", "-y.mp4", "a:b %03d.mp4", "é猫.MP4"):
        path = Path(name)
        write_video(clip(2), path, 16, {"name": name})
        assert read_metadata(path) == {"name": name}
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((2, 4, 4, 3), np.float32),
        np.zeros((2, 4, 4), np.uint8),
        np.zeros((2, 4, 4, 4), np.uint8),
        np.zeros((0, 4, 4, 3), np.uint8),
    ],
)
def test_refuses_what_is_not_frames(tmp_path: Path, frames: np.ndarray) -> None:
    with pytest.raises(ValueError, match="uint8"):
        write_video(frames, tmp_path / "a.png", 16, {})


def test_refuses_odd_sizes_for_mp4_and_frame_rates(tmp_path: Path) -> None:
    with refuses("out_of_range", what="mp4", found="31x18", remedy="--output"):
        write_video(clip(2, 18, 31), tmp_path / "a.mp4", 16, {})
    for fps in (0, -1, float("nan"), float("inf")):
        with refuses("out_of_range", expected="fps <= 1000", found=fps):
            write_video(clip(2), tmp_path / "a.png", fps, {})
    assert list(tmp_path.iterdir()) == []


def hostile_metadata(folder: Path) -> Iterator[tuple[Path, str]]:
    """Files whose metadata are none, or which their readers do not survive; and what is found."""
    for suffix in (".mp4", ".webm", ".gif", ".png"):
        yield folder / f"missing{suffix}", ""
        (folder / f"text{suffix}").write_bytes(b"not a video")
        yield folder / f"text{suffix}", ""
    frame, image, deep = Image.fromarray(clip(1)[0]), folder / "a.gif", "[" * 100_000
    for comment, found in (
        (b"made by hand", "column 1"),
        (b"[1]", "list"),
        (deep.encode(), ""),
        (b'{"a": ' + b"9" * 5000 + b"}", ""),
    ):
        frame.save(image, comment=comment)
        yield image, found
    (folder / "a.npy.json").write_text(deep)
    yield folder / "a.npy", ""
    header = struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    (folder / "a.png").write_bytes(
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    )
    yield folder / "a.png", ""


def test_metadata_that_cannot_be_read(tmp_path: Path) -> None:
    for path, found in hostile_metadata(tmp_path):
        with refuses("unreadable", what=path, found=found):
            read_metadata(path)


def test_a_comment_that_is_a_number(tmp_path: Path) -> None:
    """Taken for a size, it would be 4 GB of zeros."""
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = 4_000_000_000
    Image.fromarray(clip(1)[0]).save(tmp_path / "a.webp", exif=exif.tobytes())
    tracemalloc.start()
    assert read_metadata(tmp_path / "a.webp") == {}
    assert tracemalloc.get_traced_memory()[1] < 10**8
    tracemalloc.stop()


# --- video paths ---


def test_several_videos_are_numbered() -> None:
    assert video_paths(Path("a/b.MP4")) == [Path("a/b.MP4")]
    assert video_paths(Path("a/b.gif"), 2) == [Path("a/b-0.gif"), Path("a/b-1.gif")]


@pytest.mark.parametrize("name", ["a", "a.avi", "a.mp4.txt"])
def test_a_suffix_that_is_no_video(name: str) -> None:
    with refuses("unsupported", what=name, expected=".mp4, ", found=Path(name).suffix):
        video_paths(Path(name))
