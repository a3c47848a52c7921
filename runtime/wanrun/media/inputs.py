"""The images and videos given to a generation, and the check that they suit the model.

Neither NumPy nor Pillow is imported before an image or a video is loaded.
"""

from __future__ import annotations

__all__ = ["CHOICES", "MEDIA_KINDS", "Inputs", "Media", "beginning", "url_error"]

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import structs

from wanrun.artifact.media import CHOICES, FITS, MEDIA_KINDS, SEVERAL, Media, MediaOption
from wanrun.errors import UsageError, field, shortened, together, wrong_type

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from wanrun.artifact.manifest import Manifest
    from wanrun.artifact.task import Input


_URL = re.compile(r"(https?|ftp|s3|gs):/|data:[\w.+/-]*[;,]")
_BUILT_FOR_IT = "; a model of video from text takes one after wanbuild compile --video-to-video"


@dataclass(frozen=True, eq=False)
class Inputs:
    """Media as the arrays that programs take. Two objects are equal only if they are one.

    Attributes:
        arrays: arrays by program input; for a model with windows, videos are padded to whole windows.
            Constant arrays are broadcast, and take the memory of one value.
        facts: entries of a video's metadata: name and sha256 of the content for each option, and the mode.
        num_frames: frames of the result if the media decide their number (a model with windows), else None.
        segment_overlap: frames that a window shares with the one before; the padding depends on it.
        warnings: what is unusual about the media, and what of them is changed or left out, one line each.
    """

    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_frames: int | None = None
    segment_overlap: int = 1
    warnings: tuple[str, ...] = ()


def beginning(item: Input, frames: np.ndarray, total: int, given: int | None = None) -> dict[str, np.ndarray]:
    """Returns the arrays of an input: of one that the result begins with, filled up to the total frames.

    Args:
        item: the input.
        frames: its frames; of a video's past the first one, and those of its last chunks.
        total: those of the result.
        given: how many frames a past has; None for those that are there.
    """
    if item.count is None:
        return {item.array: frames}
    import numpy as np

    if item.past:
        return {item.array: frames, item.count: np.array(given or len(frames), np.int32)}
    filled = np.zeros((total, *frames.shape[1:]), frames.dtype)
    filled[: len(frames)] = frames
    return {item.array: filled, item.count: np.array(len(frames), np.int32)}


def chosen_mode(manifest: Manifest, media: Media) -> str | None:
    """Returns the mode in which the model is used; None for a model without modes."""
    modes = manifest.model.task.modes
    return None if modes is None else media.mode or modes.names[0]


def chosen_overlap(manifest: Manifest, media: Media) -> int:
    """Returns the frames that a window shares with the one before; 1 for a model without windows."""
    windows = manifest.model.task.windows
    return 1 if windows is None else media.segment_overlap or windows.overlaps[0]


def check_media(manifest: Manifest, media: Media) -> None:
    """Checks that a model gets the media that it needs and no others; reads no file.

    ``manifest.model.task`` says which are required, optional, or for one mode only. Raises UsageError, naming
    all that are missing, not taken by this model, or contradict each other; or for reference images that are
    not a tuple.
    """
    several = getattr(media, SEVERAL)
    if not isinstance(several, tuple | list):
        raise wrong_type(field(SEVERAL), "a tuple of images", several)
    problems = [*_wrong_inputs(manifest, media), *_useless_inputs(manifest, media)]
    problems += _wrong_choices(manifest, media)
    if problems:
        raise together(problems)


def is_given(media: Media, name: MediaOption) -> bool:
    """Returns whether the media have this image or video."""
    value = getattr(media, name)
    return value is not None and not (name == SEVERAL and not value)


def _wrong_inputs(manifest: Manifest, media: Media) -> Iterator[UsageError]:
    """Yields an error for each option that is missing, or that the model does not take."""
    inputs, variant, mode = manifest.model.task.inputs, manifest.model.variant, chosen_mode(manifest, media)
    taken = ", ".join(field(name) for name in MEDIA_KINDS if name in inputs) or "only a prompt"
    for name, kind in MEDIA_KINDS.items():
        given, option, item = is_given(media, name), field(name), inputs.get(name)
        if item is None:
            if given:
                what = f"{option} cannot be used with {variant}"
                begins = name == "video" and not manifest.model.flow_map
                remedy = "leave it out" + (_BUILT_FOR_IT if begins else "")
                yield UsageError("unsupported", what, expected=taken, remedy=remedy)
        elif given and item.mode not in (None, mode):
            wanted = f"{field('mode')} {item.mode}"
            yield UsageError(
                "no_effect", f"{option} only has an effect with {wanted}", remedy=f"pass {wanted}"
            )
        elif item.required and not given and item.mode in (None, mode):
            with_mode = f" with {field('mode')} {item.mode}" if item.mode else ""
            yield UsageError(
                "missing_parameter", f"{option} is missing: {variant} needs it{with_mode}", expected=kind
            )


def _useless_inputs(manifest: Manifest, media: Media) -> Iterator[UsageError]:
    """Yields an error for each option that has no effect without another one, or together with it."""
    for name, item in manifest.model.task.inputs.items():
        if item.beside is not None and is_given(media, name) and not is_given(media, item.beside):
            other = field(item.beside)
            yield UsageError(
                "no_effect", f"{field(name)} has no effect without {other}", remedy=f"pass {other} too"
            )
    begins = [
        field(name)
        for name, item in manifest.model.task.inputs.items()
        if item.count is not None and is_given(media, name)
    ]
    if len(begins) > 1:
        yield UsageError("conflict", f"{' and '.join(begins)} exclude each other", remedy="pass one of them")


def _wrong_choices(manifest: Manifest, media: Media) -> Iterator[UsageError]:
    """Yields an error for a mode or an overlap that the model does not have."""
    task, variant = manifest.model.task, manifest.model.variant
    mode, overlap = field("mode"), field("segment_overlap")
    if media.mode is not None and task.modes is None:
        yield UsageError("unsupported", f"{mode} cannot be used with {variant}")
    elif media.mode is not None and task.modes is not None and media.mode not in task.modes.names:
        names = " or ".join(task.modes.names)
        yield UsageError("invalid_value", f"{mode} is unknown", expected=names, found=media.mode)
    if media.fit is not None and not task.fits:
        yield UsageError(
            "unsupported", f"{field('fit')} cannot be used with {variant}", remedy="leave it out"
        )
    elif media.fit is not None and not any(
        item.required or is_given(media, name) for name, item in task.inputs.items()
    ):  # of an input that is missing there is an error already
        yield UsageError(
            "no_effect", f"{field('fit')} has no effect without an image or a video", remedy="leave it out"
        )
    elif media.fit not in (None, *FITS):
        yield UsageError(
            "invalid_value", f"{field('fit')} is unknown", expected=" or ".join(FITS), found=media.fit
        )
    if media.segment_overlap is not None and task.windows is None:
        yield UsageError("unsupported", f"{overlap} cannot be used with {variant}", remedy="leave it out")
    elif task.windows is not None and media.segment_overlap not in (None, *task.windows.overlaps):
        numbers = " or ".join(map(str, task.windows.overlaps))
        yield UsageError(
            "out_of_range", f"{overlap} is not possible", expected=numbers, found=media.segment_overlap
        )


def without_arrays(media: Media) -> Media:
    """Returns media with Pillow images in the place of arrays, such as those of NumPy.

    An image is uint8 (height, width, 3), or 4 for one with transparency; a video has the frames in front, or
    is a list of images. Raises UsageError for another array.
    """
    made = dict[str, Any]()
    for name in MEDIA_KINDS:
        value = getattr(media, name)
        if isinstance(value, list | tuple):
            if any(_is_array(one) for one in value):
                made[name] = type(value)(_image(one, name) if _is_array(one) else one for one in value)
        elif _is_array(value):
            made[name] = [_image(frame, name) for frame in value] if value.ndim == 4 else _image(value, name)
    return structs.replace(media, **made) if made else media


def _is_array(value: object) -> bool:
    return hasattr(value, "__array__")


def _image(array: Any, name: str) -> Image:
    import numpy as np  # neither where there are only files
    from PIL.Image import fromarray

    pixels = np.asarray(array)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (3, 4):
        raise UsageError(
            "wrong_type",
            f"{field(name)} is an array of another form",
            expected="uint8 (height, width, 3)",
            found=f"{pixels.dtype} {pixels.shape}",
            remedy="give a file, a Pillow image, or colours of 0 to 255",
        )
    return fromarray(pixels)


def url_error(source: object, name: str) -> UsageError | None:
    """Returns the error of an image or a video that is named by a URL: none is fetched. None for another one.

    Args:
        source: what a user has given: a text as it is written, because a path has lost a slash.
        name: the option.
    """
    if not isinstance(source, str) or not _URL.match(source):
        return None
    return UsageError(
        "wrong_kind",
        f"{name} {shortened(source)} is a URL, and URLs are not fetched",
        remedy="download it first, and give the file",
    )
