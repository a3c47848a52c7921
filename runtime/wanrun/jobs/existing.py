"""Compares existing videos with those that a run would make."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wanrun.errors import UsageError
from wanrun.files import read_bounded
from wanrun.media.video_paths import FOLDER
from wanrun.media.write_video import MAX_METADATA_BYTES, check_free, metadata_sidecar, read_metadata


def missing_videos(videos: Sequence[Path], metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the numbers of the videos that do not exist; the others must have the run's metadata.

    The metadata is that of each video, except its number.

    Raises:
        UsageError: for an existing video with other metadata, or without metadata.
    """
    missing = []
    for index, video in enumerate(videos):
        expected = {**metadata, "video": index}
        if video.exists():
            if not (video.suffix.lower() == FOLDER and video.is_dir()):
                check_free([video], overwrite=True)
            _check_same(video, expected)
        else:
            missing.append(index)
            # A run that was killed just before it named the video leaves the sidecar.
            if not _is_leftover(metadata_sidecar(video), expected):
                check_free([video], overwrite=False)
    return tuple(missing)


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metadata as read from a file, without wanrun's version and the artifact's address."""
    plain = json.loads(json.dumps(dict(metadata), default=str))
    for key in ("wanrun", "artifact"):
        plain.pop(key, None)
    return dict(plain)


def _check_same(video: Path, expected: Mapping[str, Any]) -> None:
    """Raises UsageError unless an existing video has the expected metadata."""
    remedy = "pass --overwrite to make all again, or choose another output"
    try:
        there = _plain(read_metadata(video))
    except (UsageError, RecursionError) as error:
        raise UsageError(f"the output {video} exists; {error}", remedy=remedy) from None
    wanted = _plain(expected)
    if there == wanted:
        return
    if not there:
        raise UsageError(f"the output {video} exists, and does not say how it was made", remedy=remedy)
    key = next(key for key in sorted({*wanted, *there}) if wanted.get(key, ...) != there.get(key, ...))
    raise UsageError(
        f"the output {video} exists, and was made otherwise",
        expected=f"{key} {_shown(wanted, key)}",
        found=_shown(there, key),
        remedy=remedy,
    )


def _shown(metadata: Mapping[str, Any], key: str) -> str:
    text = json.dumps(metadata[key], ensure_ascii=False) if key in metadata else "none"
    return text if len(text) <= 60 else text[:60] + "..."


def _is_leftover(sidecar: Path, expected: Mapping[str, Any]) -> bool:
    """Returns whether a sidecar without its video holds the expected metadata."""
    try:
        there = json.loads(read_bounded(sidecar, MAX_METADATA_BYTES))
        return isinstance(there, dict) and _plain(there) == _plain(expected)
    except (OSError, ValueError, RecursionError):
        return False
