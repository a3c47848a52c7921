"""The images and videos that a generation is given, and which ones a model takes.

Neither NumPy nor Pillow is imported until something is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from wanrun.artifact.task import MediaOption
from wanrun.errors import UsageError, field

if TYPE_CHECKING:
    import numpy as np

    from wanrun.artifact.manifest import Manifest
    from wanrun.media.images import ImageSource
    from wanrun.media.read_video import VideoSource

MEDIA_KINDS: Mapping[MediaOption, str] = MappingProxyType(
    {
        "image": "an image",
        "last_image": "an image",
        "reference_image": "an image",
        **dict.fromkeys(
            ("video", "mask", "pose_video", "face_video", "background_video", "mask_video"),
            "a video or a folder of images",
        ),
    }
)
"""The options that are media, and what each of them is."""


@dataclass(frozen=True)
class Media:
    """What a user gives beside the prompt.

    An image is a file or a Pillow image; a video is a file, a folder of images, or a list of Pillow images.

    Attributes:
        image: the first frame, or a character to animate.
        last_image: the last frame.
        video: what controls the result, or is edited.
        mask: white where something new is made, black where the video is kept.
        reference_image: what the video shows.
        pose_video: how the character moves; its length is the result's.
        face_video: what its face does.
        background_video: where it is put.
        mask_video: white where it is put.
        mode: one of the model's modes; its default where None.
        segment_overlap: frames that windows share; the model's default where None.
    """

    image: ImageSource | None = None
    last_image: ImageSource | None = None
    video: VideoSource | None = None
    mask: VideoSource | None = None
    reference_image: tuple[ImageSource, ...] = ()
    pose_video: VideoSource | None = None
    face_video: VideoSource | None = None
    background_video: VideoSource | None = None
    mask_video: VideoSource | None = None
    mode: str | None = None
    segment_overlap: int | None = None


@dataclass(frozen=True)
class Inputs:
    """Media as the programs take them.

    Attributes:
        arrays: by program input name; where a video is made in windows, videos are padded to whole ones.
            Constant ones are broadcast, and take no memory.
        facts: what a video's metadata records: per option the name and the sha256 of the content; the mode.
        num_frames: frames of the result where the media decide it, as they do where there are windows.
        segment_overlap: frames that windows share, for which the videos are padded.
    """

    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_frames: int | None = None
    segment_overlap: int = 1


def chosen_mode(manifest: Manifest, media: Media) -> str | None:
    """The mode to use the model in; None for a model that has none."""
    modes = manifest.model.task.modes
    return None if modes is None else media.mode or modes.names[0]


def chosen_overlap(manifest: Manifest, media: Media) -> int:
    """Frames that windows share; 1 for a model that makes none."""
    windows = manifest.model.task.windows
    return 1 if windows is None else media.segment_overlap or windows.overlaps[0]


def check_media(manifest: Manifest, media: Media) -> None:
    """Checks that a model gets the media it needs and no others; reads none.

    Args:
        manifest: ``model.task`` says which are required, optional, or for one mode.
        media: what is given.

    Raises:
        UsageError: naming all that are missing, not taken by this model, or contradict each other.
    """
    problems = [*_wrong_inputs(manifest, media), *_useless_inputs(manifest, media)]
    problems += _wrong_choices(manifest, media)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise UsageError("; ".join(problem.text for problem in problems))


def _is_given(media: Media, name: MediaOption) -> bool:
    return getattr(media, name) not in (None, ())


def _wrong_inputs(manifest: Manifest, media: Media) -> Iterator[UsageError]:
    """What is missing, or not taken."""
    inputs, variant, mode = manifest.model.task.inputs, manifest.model.variant, chosen_mode(manifest, media)
    taken = ", ".join(field(name) for name in MEDIA_KINDS if name in inputs) or "a prompt alone"
    for name, kind in MEDIA_KINDS.items():
        given, option, item = _is_given(media, name), field(name), inputs.get(name)
        if item is None:
            if given:
                what = f"{option} cannot be used with {variant}"
                yield UsageError(what, expected=taken, remedy="leave it out")
        elif given and item.mode not in (None, mode):
            wanted = f"{field('mode')} {item.mode}"
            yield UsageError(f"{option} has an effect with {wanted} alone", remedy=f"pass {wanted}")
        elif item.required and not given and item.mode in (None, mode):
            with_mode = f" with {field('mode')} {item.mode}" if item.mode else ""
            yield UsageError(f"{option} is missing: {variant} needs it{with_mode}", expected=kind)


def _useless_inputs(manifest: Manifest, media: Media) -> Iterator[UsageError]:
    """What has no effect without another input."""
    for name, item in manifest.model.task.inputs.items():
        if item.beside is not None and _is_given(media, name) and not _is_given(media, item.beside):
            other = field(item.beside)
            yield UsageError(f"{field(name)} is of no use without {other}", remedy=f"pass {other} too")


def _wrong_choices(manifest: Manifest, media: Media) -> Iterator[UsageError]:
    """A mode or an overlap that the model has not."""
    task, variant = manifest.model.task, manifest.model.variant
    mode, overlap = field("mode"), field("segment_overlap")
    if media.mode is not None and task.modes is None:
        yield UsageError(f"{mode} cannot be used with {variant}")
    elif media.mode is not None and task.modes is not None and media.mode not in task.modes.names:
        names = " or ".join(task.modes.names)
        yield UsageError(f"{mode} is unknown", expected=names, found=media.mode)
    if media.segment_overlap is not None and task.windows is None:
        yield UsageError(f"{overlap} cannot be used with {variant}", remedy="leave it out")
    elif task.windows is not None and media.segment_overlap not in (None, *task.windows.overlaps):
        numbers = " or ".join(map(str, task.windows.overlaps))
        yield UsageError(f"{overlap} is not possible", expected=numbers, found=media.segment_overlap)
