"""Compares existing videos with those that a run would make."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanrun import read_bounded
from wanrun.errors import UsageError
from wanrun.media.video_paths import FOLDER
from wanrun.media.write_video import MAX_METADATA_BYTES, check_free, metadata_sidecar, read_metadata
from wanrun.request.generation import deciding_facts

if TYPE_CHECKING:
    from wanfleet.uploads import VideoStore


def made_before(video: Path, store: VideoStore | None) -> dict[str, Any] | None:
    """Returns the metadata of an existing video, empty if it has none; None if there is no such video.

    In an object store it is that of the record, which exists before the video. Raises UsageError if it cannot
    be read.
    """
    if store is not None:
        return store.record(video.name)
    return read_metadata(video) if video.exists() else None


def missing_videos(
    videos: Sequence[Path], metadata: Mapping[str, Any], store: VideoStore | None = None
) -> tuple[int, ...]:
    """Returns the numbers of the videos that do not exist; the others must have the run's metadata.

    The metadata is that of each video, except its number. ``store`` is the object store of the videos. Raises
    UsageError for an existing video with other metadata, or without metadata.
    """
    missing = []
    for index, video in enumerate(videos):
        expected = {**metadata, "video": index}
        there = _is_here(video, expected) if store is None else _is_in_store(video.name, expected, store)
        if not there:
            missing.append(index)
    return tuple(missing)


def _is_here(video: Path, expected: Mapping[str, Any]) -> bool:
    """Returns whether a video exists; raises as ``missing_videos``, also for anything else in its place."""
    if video.exists() and not (video.suffix.lower() == FOLDER and video.is_dir()):
        check_free([video], overwrite=True)
    try:
        there = made_before(video, None)
    except (UsageError, RecursionError) as error:
        raise UsageError("exists", f"the output {video} exists; {error}", remedy=_REMEDY) from None
    if there is not None:
        check_same(str(video), there, expected)
    # A run that was killed just before it named the video leaves the sidecar.
    elif not _is_leftover(metadata_sidecar(video), expected):
        check_free([video], overwrite=False)
    return there is not None


def _is_in_store(name: str, expected: Mapping[str, Any], store: VideoStore) -> bool:
    """Returns whether a video exists with its record; raises as ``missing_videos``."""
    there = store.record(name)
    if there is not None:
        check_same(store.where(name), there, expected)
        return store.has(name)  # a run that was killed just before it put the video leaves the record
    if store.has(name, whole=False):
        raise UsageError(
            "exists", f"the output {store.where(name)} exists, and has no record", remedy=_REMEDY
        )
    return False


_REMEDY = "pass --overwrite to make all again, or choose another output"


def check_same(video: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises UsageError unless an existing video has the expected metadata, wherever it was made."""
    there, wanted = deciding_facts(found), deciding_facts(expected)
    if there == wanted:
        return
    if not there:
        raise UsageError(
            "exists", f"the output {video} exists, and does not say how it was made", remedy=_REMEDY
        )
    key = next(key for key in sorted({*wanted, *there}) if wanted.get(key, ...) != there.get(key, ...))
    expected_value, found_value = _shown(*(_text(metadata, key) for metadata in (wanted, there)))
    raise UsageError(
        "exists",
        f"the output {video} exists, and was made with other options",
        expected=f"{key} {expected_value}",
        found=found_value,
        remedy=_REMEDY,
    )


def _text(metadata: Mapping[str, Any], key: str) -> str:
    if key not in metadata:
        return "none"
    return json.dumps(metadata[key], ensure_ascii=False, sort_keys=True)


def _shown(*texts: str) -> list[str]:
    """Returns the parts of texts in which they differ, with a little of the text before."""
    alike = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*texts, strict=False))
    begin = max(0, len(list(alike)) - 30)
    before = "..." if begin else ""
    return [f"{before}{text[begin : begin + 60]}{'...' if len(text) > begin + 60 else ''}" for text in texts]


def _is_leftover(sidecar: Path, expected: Mapping[str, Any]) -> bool:
    """Returns whether a sidecar without its video holds the expected metadata."""
    try:
        there = json.loads(read_bounded(sidecar, MAX_METADATA_BYTES))
        return isinstance(there, dict) and deciding_facts(there) == deciding_facts(expected)
    except (OSError, ValueError, RecursionError):
        return False
