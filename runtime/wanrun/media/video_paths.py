"""The files of a prompt's videos."""

from __future__ import annotations

__all__ = ["CODECS", "FOLDER", "numbered_video", "video_paths"]

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from wanrun.errors import UsageError

CODECS: Mapping[str, str] = MappingProxyType({".mp4": "libx264", ".mov": "libx264", ".webm": "libvpx-vp9"})
"""ffmpeg's encoder by the suffix of the videos that it writes."""

FOLDER = ".frames"
"""The suffix of a folder of pictures."""

SUFFIXES = (*CODECS, ".gif", ".webp", ".png", ".npy", FOLDER)
"""The suffixes that a video's name may have, in upper or lower case."""


def video_paths(path: Path, count: int = 1) -> list[Path]:
    """Returns the path of each video of a prompt; several are ``name-0.ext``, ``name-1.ext`` and so on.

    Raises:
        UsageError: if the suffix is unknown.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            "unsupported",
            f"{path} has no known video format",
            expected="a name that ends in " + ", ".join(SUFFIXES),
            found=repr(path.suffix),
        )
    return [path] if count == 1 else [numbered_video(path, index) for index in range(count)]


def numbered_video(path: Path, index: int) -> Path:
    """Returns the path of one of several videos of a prompt."""
    return path.with_name(f"{path.stem}-{index}{path.suffix}")
