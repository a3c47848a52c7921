"""Random pictures and videos for tests, none of them constant or square."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Sequence
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from PIL import Image


def pixels(width: int, height: int, seed: int = 0, channels: int = 3) -> np.ndarray:
    """A smooth pattern with noise that reaches 0 and 255: uint8 (height, width, channels)."""
    random = np.random.default_rng([seed, width, height])
    y, x, c = np.ogrid[:height, :width, :channels]
    phase, period = random.uniform(0, 6, channels)[c], random.uniform(9, 40, channels)[c]
    wave = np.sin(x / period + phase) + np.cos(y / (period - 3) - 2 * phase)
    noisy = 127 + 90 * wave + random.normal(0, 12, (height, width, channels))
    return np.clip(noisy, 0, 255).astype(np.uint8)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(pixels(width, height, seed))


def with_transparent_colour(kind: str, path: Path) -> Path:
    """Writes a picture of 61x47 whose left third is one transparent colour, which nothing else has.

    Args:
        kind: ``rgb``, ``grey`` and ``palette`` are PNG files, ``turned`` one that EXIF turns, ``gif`` a GIF.
        path: the file, without a suffix.
    """
    array = np.clip(pixels(61, 47), 5, 250)
    array[:, :20] = (255, 40, 60)
    image = Image.fromarray(array)
    if kind == "grey":
        image = image.convert("L")
        image.paste(0, (0, 0, 20, 47))
    if kind in ("palette", "gif"):
        image = image.quantize(32, dither=Image.Dither.NONE)
    exif = Image.Exif()
    exif[0x0112] = 6 if kind == "turned" else 1
    path = path.with_suffix(".gif" if kind == "gif" else ".png")
    options = {} if kind == "gif" else {"exif": exif.tobytes()}
    image.save(path, transparency=image.getpixel((0, 0)), **options)
    return path


TRANSPARENT = ("rgb", "turned", "grey", "palette", "gif")
"""The kinds of ``with_transparent_colour``."""


def many_scans(image: Image.Image, repeats: int) -> bytes:
    """A small progressive JPEG that takes long: its last scan comes again and again."""
    data = io.BytesIO()
    image.save(data, "JPEG", progressive=True)
    content = data.getvalue()
    return content[:-2] + content[content.rfind(b"\xff\xda") : -2] * repeats + content[-2:]


def pictures(count: int, width: int, height: int, seed: int = 0) -> list[Image.Image]:
    return [picture(width, height, seed + 100 * index) for index in range(count)]


def same(first: Image.Image, second: Image.Image) -> bool:
    return first.size == second.size and first.mode == second.mode and first.tobytes() == second.tobytes()


def write_folder(frames: Sequence[Image.Image], folder: Path) -> Path:
    """Frames as PNG files without leading zeros."""
    folder.mkdir(parents=True)
    for index, frame in enumerate(frames):
        frame.save(folder / f"frame{index}.png")
    return folder


def ffmpeg(*arguments: object, data: bytes = b"") -> None:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *map(str, arguments)]
    subprocess.run(command, input=data, check=True, capture_output=True)


def write_video(frames: Sequence[Image.Image], path: Path, *options: str) -> Path:
    """Frames at 10 a second, in what the name's suffix says."""
    width, height = frames[0].size
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", "10", "-i", "pipe:0"]
    data = b"".join(frame.tobytes() for frame in frames)
    ffmpeg(*source, *(options or ("-pix_fmt", "yuv420p")), path, data=data)
    return path


def write_variable(frames: Sequence[Image.Image], path: Path, seconds: Sequence[float]) -> Path:
    """A video whose frames are shown for so many seconds each."""
    folder = write_folder(frames, path.with_suffix(""))
    names = [f"file 'frame{index}.png'\nduration {time}\n" for index, time in enumerate(seconds)]
    (folder / "list.txt").write_text("".join(names))
    options = ["-fps_mode", "vfr", "-pix_fmt", "yuv420p", "-movflags", "+faststart"]
    ffmpeg("-f", "concat", "-i", folder / "list.txt", *options, path)
    return path
