"""The images and videos that a request names."""

from __future__ import annotations

__all__ = ["media_files"]

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import structs

from wanrun.errors import UsageError, field
from wanrun.media.inputs import CHOICES, MEDIA_KINDS, Inputs, Media, without_arrays
from wanrun.request.request import Request
from wanrun.request.schema import rows
from wanrun.rows import Row


def media_files(request: Request) -> Iterator[tuple[Row, tuple[Path, ...]]]:
    """Yields the media options of a request with their files; options that take several files come last."""
    for row in sorted(rows(), key=lambda row: row.many):
        if row.name in MEDIA_KINDS:
            value = getattr(request, row.name) or ()
            yield row, tuple(map(Path, (value,) if isinstance(value, str) else value))


def media_of(request: Request) -> Media:
    """Returns the media that a request names, as files."""
    named = {row.name: files if row.many else files[0] for row, files in media_files(request) if files}
    given: dict[str, Any] = {**named, **{name: getattr(request, name) for name in CHOICES}}
    return Media(**given)


def given_media(request: Request, media: Media | None, inputs: Inputs | None) -> Media | None:
    """Returns the images and videos of a generation that are still to be read; None if none are given.

    The request may name files; ``media`` are files or in memory; ``inputs`` were already read. Raises
    UsageError if they are given in two ways, or if ``inputs`` are given with ``fit`` or another overlap than
    theirs.
    """
    named = next((name for name in (*MEDIA_KINDS, "mode") if getattr(request, name) not in (None, ())), None)
    if named is not None and (media is not None or inputs is not None):
        raise UsageError(
            "conflict",
            f"{field(named)} is given together with {'inputs' if media is None else 'media'}",
            remedy="give images and videos in one way: by name, as media, or as inputs",
        )
    if media is not None and inputs is not None:
        raise UsageError("conflict", "media and inputs exclude each other", remedy="pass one of them")
    if inputs is not None and request.fit is not None:
        raise UsageError(
            "conflict",
            f"{field('fit')} is given together with inputs",
            remedy="give it to the Media that they are loaded from",
        )
    if inputs is not None and request.segment_overlap not in (None, inputs.segment_overlap):
        raise UsageError(
            "mismatch",
            f"{field('segment_overlap')} is not that of the inputs",
            expected=inputs.segment_overlap,
            found=request.segment_overlap,
            remedy="give it to the Media that they are loaded from",
        )
    given = media_of(request) if named is not None else None if media is None else without_arrays(media)
    choices = {name: value for name in CHOICES if (value := getattr(request, name)) is not None}
    return structs.replace(given or Media(), **choices) if choices and inputs is None else given
