"""The files of a prompt's videos."""

from __future__ import annotations

from pathlib import Path

from wanrun.errors import UsageError

SUFFIXES = (".mp4", ".gif", ".webp", ".png", ".npy")
"""The suffixes that a video's name may have, in upper or lower case."""


def video_paths(path: Path, count: int = 1) -> list[Path]:
    """Returns the path of each video of a prompt; several are ``name-0.ext``, ``name-1.ext`` and so on.

    Raises:
        UsageError: if the suffix is unknown.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{path} has no known video format",
            expected="a name that ends in " + ", ".join(SUFFIXES),
            found=repr(path.suffix),
        )
    return [path] if count == 1 else [path.with_name(f"{path.stem}-{i}{path.suffix}") for i in range(count)]
