"""Names of results: what their fields become, and whether they can be written. Checked before the work.

| field | becomes |
|---|---|
| ``{index}`` | which of the prompts it is, from 1, zero padded to the length of their number |
| ``{seed}`` | the seed |
| ``{slug}`` | the prompt's first words: lower case letters and digits joined by ``-`` |
| ``{{``, ``}}`` | a brace |

``{index:04}`` and ``{seed:04}`` pad to four digits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from wanrun.errors import UsageError
from wanrun.media.ffmpeg import check_h264
from wanrun.media.write_video import metadata_sidecar

SUFFIXES = (".mp4", ".gif", ".webp", ".png", ".npy")
"""What a video's name may end in, in any case."""

_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_FIELD = re.compile(r"(index|seed)(?::0([1-9][0-9]?))?|(slug)")
_SLUG_LENGTH = 40  # of up to 4 bytes each, where a file name holds 255


def slug(prompt: str) -> str:
    """The prompt's first words as a part of a file name; ``video`` where it has no letter or digit."""
    text = ""
    for word in re.findall(r"[^\W_]+", prompt.lower()):
        longer = f"{text}-{word}" if text else word[:_SLUG_LENGTH]
        if len(longer) > _SLUG_LENGTH:
            break
        text = longer
    return text or "video"


def expand(pattern: str, option: str, *, index: int, total: int, seed: int, prompt: str) -> str:
    """Puts values in the place of a name's fields.

    Args:
        pattern: the name, with or without fields.
        option: whose name it is, for messages.
        index: which prompt it is, from 1.
        total: how many there are.
        seed: of the initial noise.
        prompt: what ``{slug}`` is made from.

    Raises:
        UsageError: for a field that is not in the table above.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        field = _FIELD.fullmatch(match[1])
        if field is None:
            raise UsageError(
                f"{option} {pattern} has an unknown field",
                expected="{index}, {index:04}, {seed}, {seed:04} or {slug}",
                found=match[0],
                remedy="write {{ and }} for braces",
            )
        if field[3]:
            return slug(prompt)
        if field[1] == "seed":
            return f"{seed:0{field[2] or 1}}"
        return f"{index:0{field[2] or len(str(total))}}"

    return _TOKEN.sub(value, pattern)


def numbered(pattern: str) -> str:
    """The name itself if it has a field, else with ``-{index}`` before its suffix."""
    if any(match[1] is not None for match in _TOKEN.finditer(pattern)):
        return pattern
    stem, suffix = os.path.splitext(pattern)  # noqa: PTH122 - Path would drop a leading ./
    return f"{stem}-{{index}}{suffix}"


def video_paths(path: Path, count: int = 1) -> list[Path]:
    """The path of each video of a prompt: for more than one ``name-0.ext``, ``name-1.ext`` and so on.

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


@contextmanager
def usable_names() -> Iterator[None]:
    """Turns what the file system says of a name, that it is too long for one, into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{error.filename} cannot be written", found=error.strerror, remedy="choose another name"
        ) from None


def check_folder(folder: Path) -> None:
    """Raises UsageError unless files can be made in this folder."""
    if not folder.is_dir():
        raise UsageError(f"the output folder {folder} is not there", remedy=f"mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"the output folder {folder} is not writable", remedy="choose another --output")


def check_free(videos: Sequence[Path], overwrite: bool) -> None:
    """Raises UsageError if a folder, or without overwrite a file, is in the way of these videos."""
    for video in videos:
        for file in (video, metadata_sidecar(video)) if video.suffix.lower() == ".npy" else (video,):
            if file.is_dir():
                raise UsageError(f"the output {file} is a folder", remedy="choose another --output")
            if file.exists() and not overwrite:
                raise UsageError(
                    f"the output {file} exists", remedy="pass --overwrite to replace it, or another --output"
                )


def check_encoder(videos: Iterable[Path]) -> None:
    """Raises UsageError if one of these videos is written by ffmpeg, and there is none that can."""
    if any(video.suffix.lower() == ".mp4" for video in videos):
        check_h264()


def check_output(path: Path, overwrite: bool, count: int = 1) -> list[Path]:
    """Checks, before any work is spent, that the results can be written.

    Args:
        path: the output path that was asked for.
        overwrite: whether files that exist may be replaced.
        count: how many videos.

    Returns:
        The path of each video, as ``video_paths``.

    Raises:
        UsageError: if the suffix is unknown, the folder is missing or not writable, or a file is in the way.
    """
    videos = video_paths(path, count)
    check_folder(path.parent)
    check_free(videos, overwrite)
    return videos


def check_file(path: Path | None, option: str, overwrite: bool) -> None:
    """Raises UsageError if a file that is no video (or None: it was not asked for) cannot be written."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written", remedy="name a file in a writable folder")
    if path.exists() and not overwrite:
        raise UsageError(f"{option} {path} exists", remedy="pass --overwrite to replace it")


def check_new_folder(path: Path | None, option: str) -> None:
    """Raises UsageError if a folder (or None) is not there and cannot be made, or cannot be written to."""
    if path is None:
        return
    nearest = path.absolute()
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(
            f"{option} {path} cannot be written",
            expected="a folder, or where one can be made",
            found=f"{nearest}, which is {'not writable' if nearest.is_dir() else 'no folder'}",
        )
