"""The names and digests of a generation's images and videos, for its metadata."""

from __future__ import annotations

__all__ = ["media_facts"]

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.media import FITS, ImageSource, MediaOption, VideoSource
from wanrun.artifact.programs import Profile
from wanrun.errors import field
from wanrun.media.images import file_digest
from wanrun.media.inputs import MEDIA_KINDS, Media, check_media, chosen_mode
from wanrun.media.read_video import video_digest


def media_facts(manifest: Manifest, profile: Profile, media: Media) -> Mapping[str, Any] | None:
    """Returns the ``facts`` of ``wanrun.media.prepare.load_media`` without decoding: files are only digested.

    None for a model with windows, and for images in memory. Equal facts mean equal media. They do not show
    that the media can be decoded or fit the profile.

    Raises:
        UsageError: as ``check_media``, and for a file that cannot be read.
    """
    check_media(manifest, media)
    if manifest.model.task.windows is not None:  # one video decides how many frames of a folder are used
        return None
    digests: dict[str, list[str]] = {}
    for name, source in given_media(manifest, media):
        if not isinstance(source, Path | str):
            return None
        option = field(name)
        item = manifest.model.task.inputs[name]
        if item.kind == "video":
            digest = video_digest(source, option, None if item.past else profile.num_frames)
        else:
            digest = file_digest(source, option)
        digests.setdefault(name, []).append(digest)
    return facts_of(manifest, media, digests)


def given_media(manifest: Manifest, media: Media) -> Iterator[tuple[MediaOption, ImageSource | VideoSource]]:
    """Yields the given media with their options; ``check_media`` has refused options of other models."""
    inputs = manifest.model.task.inputs
    for name in (name for name in MEDIA_KINDS if name in inputs):
        source = getattr(media, name)
        if inputs[name].kind == "images":
            yield from ((name, image) for image in source)
        elif source is not None:
            yield name, source


def facts_of(manifest: Manifest, media: Media, digests: Mapping[str, list[str]]) -> dict[str, Any]:
    """Returns the metadata's entries: names and digests of the media, lists of them for reference images."""
    names: dict[MediaOption, list[str | None]] = {}
    for name, source in given_media(manifest, media):
        names.setdefault(name, []).append(_name(source))
    facts: dict[str, Any] = {}
    for name in names:
        many = manifest.model.task.inputs[name].kind == "images"
        facts[name] = names[name] if many else names[name][0]
        facts[f"{name}_sha256"] = digests[name] if many else digests[name][0]
    if manifest.model.task.modes is not None:
        facts["mode"] = chosen_mode(manifest, media)
    if media.fit not in (None, FITS[0]):  # else as in videos of earlier versions
        facts["fit"] = media.fit
    return facts


def _name(source: ImageSource | VideoSource) -> str | None:
    """Returns a file's name without its folder; None for images in memory."""
    return Path(source).absolute().name if isinstance(source, Path | str) else None
