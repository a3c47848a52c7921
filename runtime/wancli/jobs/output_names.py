"""The names of results: replaces their fields, and checks before the first step that they can be written.

| field | replacement |
|---|---|
| ``{index}`` | the prompt's number, from 1, zero padded to the digits of the number of prompts |
| ``{seed}`` | the seed |
| ``{slug}`` | the prompt's first words: lower case letters and digits joined by ``-`` |
| ``{{``, ``}}`` | a brace |

``{index:04}`` and ``{seed:04}`` pad to four digits.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from wanrun import Timings, replace_file
from wanrun.errors import UsageError, unwritable
from wanrun.media.ffmpeg import check_encodes
from wanrun.media.video_paths import CODECS

_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_FIELD = re.compile(r"(index|seed)(?::0([1-9][0-9]?))?|(slug)")
_SLUG_LENGTH = 40  # of up to 4 bytes each, where a file name holds 255


def slug(prompt: str) -> str:
    """Returns the prompt's first words as a part of a file name; ``video`` for no letter or digit."""
    text = ""
    for word in re.findall(r"[^\W_]+", prompt.lower()):
        longer = f"{text}-{word}" if text else word[:_SLUG_LENGTH]
        if len(longer) > _SLUG_LENGTH:
            break
        text = longer
    return text or "video"


def expand(pattern: str, option: str, *, index: int, total: int, seed: int, prompt: str) -> str:
    """Replaces the fields of a name by values; raises UsageError for one that is not in the table above.

    ``option`` is the name's option, for messages. ``index`` counts prompts from 1.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        field = _FIELD.fullmatch(match[1])
        if field is None:
            raise UsageError(
                "unknown_parameter",
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
    """Returns the name itself if it has a field, else the name with ``-{index}`` before its suffix."""
    if any(match[1] is not None for match in _TOKEN.finditer(pattern)):
        return pattern
    stem, suffix = os.path.splitext(pattern)  # noqa: PTH122 - Path would drop a leading ./
    return f"{stem}-{{index}}{suffix}"


def check_folder(folder: Path) -> None:
    """Raises UsageError unless files can be created in this folder."""
    if not folder.is_dir():
        raise UsageError(
            "missing_file", f"the output folder {folder} is not there", remedy=f"mkdir -p {folder}"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            "unwritable", f"the output folder {folder} is not writable", remedy="choose another --output"
        )


def check_encoder(videos: Iterable[Path]) -> None:
    """Raises UsageError if one of these videos needs ffmpeg, and no ffmpeg writes its format."""
    for suffix in sorted({video.suffix.lower() for video in videos} & CODECS.keys()):
        check_encodes(suffix, CODECS[suffix])


def write_timings(timings: Timings, path: Path | None) -> None:
    """Writes ``Timings.as_json``, indented and atomically; None means no file.

    Raises UsageError if the file cannot be written.
    """
    if path is None:
        return
    try:
        replace_file(path, (json.dumps(timings.as_json(), indent=2) + "\n").encode())
    except OSError as error:
        raise unwritable(f"the timing file {path}", error, "choose another --timing-json") from error
