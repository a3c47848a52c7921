"""Videos for a page: the file itself if browsers play it, and a contact sheet, which is printed too."""

from __future__ import annotations

import base64
import io
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import imageio_ffmpeg
import numpy as np
from PIL import Image, ImageSequence

from wanreport.report import Clip, Picture
from wanrun import file_sha256
from wanrun.errors import UsageError

PLAYED: Mapping[str, str] = MappingProxyType(
    {
        ".mp4": "video/mp4",
        ".webm": "video/webm",
        ".gif": "image/gif",
        ".webp": "image/webp",
        ".png": "image/png",
    }
)
"""The media types of the formats that every browser plays."""

CONTAINERS = (".mp4", ".mov", ".webm")
"""The formats that ffmpeg reads; Pillow reads the others."""

CLIP_BYTES, PAGE_BYTES = 12 << 20, 48 << 20
"""The most bytes of one video, and of all videos of a page. Firefox takes data URIs of 32 MiB."""

SHEET_FRAMES, SHEET_COLUMNS, SHEET_WIDTH = 6, 3, 960
"""Frames of a contact sheet and in each of its rows, and its width in pixels."""

POSTER, THUMBNAIL = 480, 160
"""Widths of the first frame of a video, and of the picture in a table, in pixels."""


def sheet(frames: Sequence[Image.Image]) -> Picture:
    """Returns a contact sheet: evenly spaced frames, the first and the last among them. All have one size."""
    count = min(SHEET_FRAMES, len(frames))
    chosen = [frames[round(index)] for index in np.linspace(0, len(frames) - 1, count)]
    columns = min(SHEET_COLUMNS, count)
    width, height = _fitted(chosen[0].size, SHEET_WIDTH // columns)
    gap = max(width // 40, 2)
    rows = -(-count // columns)
    board = Image.new("RGBA", (columns * (width + gap) - gap, rows * (height + gap) - gap))
    for place, frame in enumerate(chosen):
        row, column = divmod(place, columns)
        cell = frame.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        board.paste(cell, (column * (width + gap), row * (height + gap)))
    return _picture(board)


def still(frame: Image.Image, width: int) -> Picture:
    """Returns one frame of this width, in pixels."""
    return _picture(frame.convert("RGB").resize(_fitted(frame.size, width), Image.Resampling.BICUBIC))


def clip(video: Path, room: int) -> tuple[Clip | None, str]:
    """Returns a video's file for a page, or None and the reason; raises UsageError if it cannot be read.

    ``room`` is how many more bytes the page may hold.
    """
    suffix = video.suffix.lower()
    if suffix not in PLAYED:
        return None, f"Browsers do not play {suffix}: these are frames of it."
    try:
        size = video.stat().st_size
        if size > min(CLIP_BYTES, room):
            return None, f"The file is too large for this page ({size / 1e6:.1f} MB): these are frames of it."
        data = video.read_bytes()
    except OSError as error:
        raise unreadable(video, error.strerror or str(error)) from None
    return Clip(_uri(PLAYED[suffix], data), PLAYED[suffix].startswith("image/")), ""


def frames_of(video: Path) -> list[Image.Image]:
    """Returns all frames of a video in any of wanrun's formats; large ones made smaller.

    Raises UsageError if it cannot be read.
    """
    try:
        found = [frame.copy() for frame in _opened(video)]
    except (OSError, ValueError, SyntaxError, EOFError, RuntimeError) as error:  # the last: no ffmpeg
        raise unreadable(video, str(error)) from None
    if not found:
        raise unreadable(video, "no frame")
    return found


def digest(video: Path) -> tuple[int, str]:
    """Returns a file's number of bytes and its sha256; raises UsageError if it cannot be read."""
    try:
        return video.stat().st_size, file_sha256(video)
    except OSError as error:
        raise unreadable(video, error.strerror or str(error)) from None


def images(frames: np.ndarray) -> list[Image.Image]:
    """Returns frames uint8 (T, H, W, 3) as images."""
    return [Image.fromarray(frame) for frame in frames]


def unreadable(video: Path, found: str) -> UsageError:
    """Returns the error of a video that the report cannot show."""
    return UsageError(
        "unreadable", f"{video} cannot be read", expected="the video that was written", found=found
    )


def _opened(video: Path) -> Iterator[Image.Image]:
    if video.is_dir():
        for file in sorted(video.iterdir()):
            with Image.open(file) as frame:
                yield frame
    elif video.suffix.lower() == ".npy":
        yield from images(np.load(video, mmap_mode="r", allow_pickle=False))
    elif video.suffix.lower() in CONTAINERS:
        yield from images(_decoded(video))
    else:
        with Image.open(video) as opened:
            yield from ImageSequence.Iterator(opened)


def _decoded(video: Path) -> np.ndarray:
    """Returns a video's frames, uint8 (T, H, W, 3), no wider than the pictures made of them."""
    small = f"scale='min(iw,{POSTER})':-2"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-v", "error", "-i", str(video.absolute())]
    done = subprocess.run(
        [*command, "-vf", small, "-f", "image2pipe", "-c:v", "ppm", "-"], capture_output=True, check=False
    )
    if done.returncode:
        raise OSError(done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2] or "ffmpeg failed")
    kind, size, most, *_ = done.stdout.split(b"\n", 3)  # each picture has the same three lines in front
    width, height = map(int, size.split())
    head = sum(map(len, (kind, size, most))) + 3
    pictures = np.frombuffer(done.stdout, np.uint8).reshape(-1, head + height * width * 3)
    return pictures[:, head:].reshape(-1, height, width, 3)


def _fitted(size: tuple[int, int], width: int) -> tuple[int, int]:
    return width, max(round(size[1] * width / size[0]), 1)


def _picture(image: Image.Image) -> Picture:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=85, method=4)
    return Picture(_uri("image/webp", buffer.getvalue()), *image.size)


def _uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
