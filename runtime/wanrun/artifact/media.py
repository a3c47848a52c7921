"""The images and videos of a generation: one typed record, with a row for each option.

The options of a request that are files (``wanrun.request.request``), the media that Python gives in memory,
and the inputs that a manifest's task may have derive from ``Media`` (``wanrun.rows``). A new kind of media is
one row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final, Literal

from msgspec import Meta, Struct

from wanrun.rows import option, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy import ndarray
    from PIL.Image import Image

    ImageSource = Path | str | Image | ndarray
    VideoSource = Path | str | Sequence[Image] | Sequence[ndarray] | ndarray
    Images = tuple[ImageSource, ...]
    Mode = str
    Overlap = int
    Fit = str
else:  # as a command line or a line of JSON can name them
    ImageSource = VideoSource = Annotated[str, Meta(min_length=1)]
    Images = ImageSource | tuple[ImageSource, ...]
    Mode = Literal["animate", "replace"]
    Overlap = Literal[1, 5]
    Fit = Literal["stretch", "crop", "pad"]


class Media(Struct, frozen=True):
    """The images and videos that a user gives with the prompt, and the choices for their use.

    An image is a file, a Pillow image or a NumPy array, uint8 (height, width, 3); a video is a file, a folder
    of images, a list of images, or an array with the frames in front.
    None of them is checked before ``wanrun.media.inputs.check_media``.
    """

    image: Annotated[
        ImageSource | None,
        option(
            "First frame of the video; for Animate the character.",
            page={
                "": "First frame of the video.",
                "Animate": "The character.",
                "Helios": "Image that the video goes on after.",
            },
            models="I2V, FLF2V, TI2V, Animate, AnyFlow-FAR, Helios",
            also="first_frame image_path input_image",
        ),
    ] = None
    last_image: Annotated[
        ImageSource | None,
        option(
            "Last frame of the video; optional for I2V.",
            page="Last frame of the video.",
            models="FLF2V, Wan 2.2 I2V",
            also="end_image last_frame last_frame_path",
        ),
    ] = None
    video: Annotated[
        VideoSource | None,
        option(
            "Control video, or the video to edit; of T2V and TI2V the video to begin with, in a profile "
            "built with --video-to-video; of AnyFlow-FAR and Helios the video to continue.",
            page={
                "": "Control video, or the video to edit.",
                "video to video": "Video to begin with, which is changed.",
                "AnyFlow-FAR": "Video to continue, instead of an image.",
                "Helios": "Video to continue, instead of an image.",
            },
            models="VACE, T2V, TI2V, AnyFlow-FAR, Helios",
            value="DIR|FILE",
            also="src_video video_path",
        ),
    ] = None
    mask: Annotated[
        VideoSource | None,
        option(
            "White where --video gets new content.",
            default="all",
            models="VACE",
            value="DIR|FILE",
            also="src_mask",
        ),
    ] = None
    reference_image: Annotated[
        Images, option("Image of a subject of the video; repeatable.", models="VACE", also="ref_image")
    ] = ()
    pose_video: Annotated[
        VideoSource | None,
        option("Video of the poses to take.", models="Animate", value="DIR|FILE", also="src_pose_path"),
    ] = None
    face_video: Annotated[
        VideoSource | None,
        option(
            "Video of the face whose expressions to take.",
            models="Animate",
            value="DIR|FILE",
            also="src_face_path",
        ),
    ] = None
    background_video: Annotated[
        VideoSource | None,
        option(
            "Video that the character is put into.",
            page="Video that the character is put into, if --mode is replace.",
            models="Animate with --mode replace",
            value="DIR|FILE",
            also="src_bg_path",
        ),
    ] = None
    mask_video: Annotated[
        VideoSource | None,
        option(
            "White where the character goes.",
            page="White where the character goes, if --mode is replace.",
            models="Animate with --mode replace",
            value="DIR|FILE",
            also="src_mask_path",
        ),
    ] = None
    mode: Annotated[
        Mode | None,
        option(
            "Animate the character, or put it in somebody's place in a video.",
            default="animate",
            models="Animate",
            needs=lambda manifest: manifest.model.task.modes is not None,
        ),
    ] = None
    segment_overlap: Annotated[
        Overlap | None,
        option(
            "Frames that a window of a long video shares with the one before.", default="1", models="Animate"
        ),
    ] = None
    fit: Annotated[
        Fit | None,
        option(
            "How an image or a video of another shape is brought to the size: stretched, as the reference "
            "does; cropped around the middle; or padded with black.",
            page="How an image or a video of another shape is brought to the size: stretched; cropped around "
            "the middle; or padded with black.",
            default="stretch",
            models="I2V, FLF2V, TI2V, Animate, AnyFlow-FAR, Helios, T2V with --video",
            needs=lambda manifest: manifest.model.task.fits,
        ),
    ] = None


_KINDS: Mapping[str, str] = MappingProxyType(
    {"FILE": "an image", "DIR|FILE": "a video or a folder of images"}
)

MEDIA_KINDS: Mapping[str, str] = MappingProxyType(
    {row.name: kind for value, kind in _KINDS.items() for row in rows_of(Media) if row.value == value}
)
"""The options that are images or videos, images first, and what each takes, for messages."""

MASKS: Final = frozenset(("mask", "mask_video"))
"""The options whose white parts say where something goes."""

FITS: Final = next(row.choices for row in rows_of(Media) if row.name == "fit")
"""The values of ``fit``, the default first."""

CHOICES: Final = tuple(row.name for row in rows_of(Media) if row.name not in MEDIA_KINDS)
"""The options that say how these are used."""

SEVERAL: Final = next(row.name for row in rows_of(Media) if row.many)
"""The only one of them that may be given several times."""

FIRST: Final = "image"
"""The image that a video may begin with."""

if TYPE_CHECKING:
    MediaOption = str
else:
    MediaOption = Literal[tuple(MEDIA_KINDS)]
    """The names of these options, which are all that a manifest may have."""
