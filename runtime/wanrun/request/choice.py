"""Reads the options of ``Pipeline.generate``, and chooses the built profile for them and their media."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import select_profile
from wanrun.denoising.noise import Noise
from wanrun.errors import UsageError, field
from wanrun.media.types import MEDIA_KINDS, Inputs, Media, check_media
from wanrun.request.arguments import check_media_options
from wanrun.request.options import has_guidance, profile_by_name, profile_options
from wanrun.request.plain import as_plain
from wanrun.request.reading import read_request
from wanrun.request.request import Request
from wanrun.request.rows import aliases, rows
from wanrun.rows import Row
from wanrun.terminal.console import parse_size


def asked_for(loaded: Profile, options: Mapping[str, Any]) -> Request:
    """Makes a request of options; the defaults of size, frames and number of videos are the loaded profile's.

    Args:
        loaded: the loaded profile.
        options: fields of ``Request`` by name; None means the default.

    Raises:
        UsageError: naming every option that is unknown or out of range, or one that is no file's path.
    """
    given = [(aliases().get(name, name), value) for name, value in options.items() if value is not None]
    check_media_options(dict(given))
    named = {name for name, _ in given}
    defaults = {} if "profile" in named else profile_options(loaded)
    shape = [(name, value) for name, value in defaults.items() if name not in named]
    request = read_request([*shape, *((name, _size(name, value)) for name, value in given)], Request)
    Noise(request.seed)  # refuses one that is too large
    return request


def _size(name: str, value: Any) -> Any:
    """Returns a size that is a list as a tuple, and every other value as it is."""
    if name != "size":
        return value
    plain = as_plain(value)
    return tuple(plain) if isinstance(plain, list) else value


def media_asked_for(request: Request, media: Media | None, inputs: Inputs | None) -> Media | None:
    """Returns the images and videos of a generation: the given media, or the files that its request names.

    Raises:
        UsageError: if the request names files and media or inputs are given too.
    """
    named = [name for name in (*MEDIA_KINDS, "mode") if getattr(request, name) not in (None, ())]
    if not named:
        return media
    if media is not None or inputs is not None:
        raise UsageError(
            f"{field(named[0])} is given beside {'inputs' if media is None else 'media'}",
            remedy="give images and videos in one way: by name, as media, or as inputs",
        )
    return media_of(request)


def media_files(request: Request) -> Iterator[tuple[Row, tuple[Path, ...]]]:
    """Yields the media options of a request with their files; options that take several files come last."""
    for row in sorted(rows(), key=lambda row: row.many):
        if row.name in MEDIA_KINDS:
            value = getattr(request, row.name) or ()
            yield row, tuple(map(Path, (value,) if isinstance(value, str) else value))


def media_of(request: Request) -> Media:
    """Returns the media that a request names, as files."""
    named = {row.name: files if row.many else files[0] for row, files in media_files(request) if files}
    given: dict[str, Any] = {**named, "mode": request.mode, "segment_overlap": request.segment_overlap}
    return Media(**given)


def chosen_profile(
    manifest: Manifest,
    artifact: Path,
    loaded: Profile,
    request: Request,
    given: Media | Inputs | None,
) -> Profile:
    """The profile of a generation: the loaded one, but for what the request and its media say otherwise.

    Args:
        manifest: the artifact's manifest.
        artifact: its folder, for messages.
        loaded: the profile that was loaded.
        request: what is asked for, with a size and a number of frames.
        given: images and videos.

    Raises:
        ArtifactError: listing the built profiles, if there is none for this request.
        UsageError: for media that the model does not take, and for a named profile with another shape than
            is asked for.
    """
    references = _num_references(manifest, given)
    if request.profile is not None:
        return profile_by_name(manifest, artifact, request, references)
    assert request.size is not None and request.num_frames is not None
    width, height = parse_size(request.size)
    return select_profile(
        manifest,
        artifact,
        (width, height),
        request.num_frames,
        request.num_videos,
        has_guidance(manifest, request.guidance_scale, loaded),
        loaded.num_references if references is None else references,
    )


def _num_references(manifest: Manifest, given: Media | Inputs | None) -> int | None:
    """Returns the number of reference images; None for a model without them, and if no media are given."""
    if isinstance(given, Media):
        check_media(manifest, given)
    counted = manifest.model.task.counted
    if given is None or counted is None:
        return None
    name, item = counted
    return len(getattr(given, name) if isinstance(given, Media) else given.arrays.get(item.array, ()))
