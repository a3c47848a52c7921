"""The images and videos that a generation is given, and which ones a task takes.

Neither NumPy nor Pillow is imported until something is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from wanrun.errors import UsageError, field

if TYPE_CHECKING:
    import numpy as np

    from wanrun.artifact.manifest import Manifest
    from wanrun.media.images import ImageSource
    from wanrun.media.read_video import VideoSource

MODES = ("animate", "replace")
"""Animate's, the default first: the character moves as in the video, or is put into it."""

OVERLAPS = (1, 5)
"""Frames that a segment of Animate may begin with of the one before, the default first: as it was trained."""

MEDIA_KINDS: Mapping[str, str] = MappingProxyType(
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
        image: the first frame; for Animate the character.
        last_image: the last frame.
        video: what VACE edits.
        mask: white where VACE makes something new, black where it keeps the video.
        reference_image: what VACE takes subjects from.
        pose_video: how the character moves; its length is the result's.
        face_video: what its face does.
        background_video: where it is put, in mode replace.
        mask_video: white where it is put.
        mode: animate, which is the default, or replace.
        segment_overlap: frames that Animate's segments share, 1 or 5.
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
    segment_overlap: int = 1


@dataclass(frozen=True)
class Inputs:
    """Media as the programs take them.

    Attributes:
        arrays: by program input name; videos of Animate are padded to whole segments. Constant ones are
            broadcast, and take no memory.
        facts: what a video's metadata records: per option the name and the sha256 of the content; the mode.
        num_frames: frames of the result where the media decide it, which Animate's do.
        segment_overlap: frames that Animate's segments share, for which the videos are padded.
    """

    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_frames: int | None = None
    segment_overlap: int = 1


def check_media(manifest: Manifest, media: Media) -> None:
    """Checks that a task gets the media it needs and no others; reads none.

    Args:
        manifest: ``model.inputs`` says which are required, optional, or needed to replace.
        media: what is given.

    Raises:
        UsageError: naming all that are missing, not taken by this task, or contradict each other.
    """
    problems = list(_problems(manifest, media))
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise UsageError("; ".join(problem.text for problem in problems))


def _problems(manifest: Manifest, media: Media) -> Iterator[UsageError]:
    inputs: Mapping[str, str] = manifest.model.inputs
    variant, animate = manifest.model.variant, manifest.model.task == "animate"
    taken = ", ".join(field(name) for name in inputs) or "a prompt alone"
    replace = animate and media.mode == "replace"
    for name, kind in MEDIA_KINDS.items():
        given = getattr(media, name) not in (None, ())
        option, needs = field(name), inputs.get(name)
        if given and needs is None:
            yield UsageError(f"{option} cannot be used with {variant}", expected=taken, remedy="leave it out")
        elif given and needs == "replace" and not replace:
            mode = field("mode")
            yield UsageError(
                f"{option} has an effect with {mode} replace alone", remedy=f"pass {mode} replace"
            )
        elif not given and (needs == "required" or (needs == "replace" and replace)):
            with_mode = f" with {field('mode')} replace" if needs == "replace" else ""
            yield UsageError(f"{option} is missing: {variant} needs it{with_mode}", expected=kind)
    if media.mask is not None and media.video is None and "mask" in inputs:
        video = field("video")
        yield UsageError(f"{field('mask')} is of no use without {video}", remedy=f"pass {video} too")
    if media.mode is not None and (not animate or media.mode not in MODES):
        expected = " or ".join(MODES) if animate else None
        option = field("mode")
        what = f"{option} is unknown" if animate else f"{option} cannot be used with {variant}"
        yield UsageError(what, expected=expected, found=media.mode if animate else None)
    if media.segment_overlap not in (OVERLAPS if animate else OVERLAPS[:1]):
        option = field("segment_overlap")
        if animate:
            yield UsageError(f"{option} is not possible", expected="1 or 5", found=media.segment_overlap)
        else:
            yield UsageError(f"{option} cannot be used with {variant}", remedy="leave it out")
