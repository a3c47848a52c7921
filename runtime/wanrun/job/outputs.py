"""The files that are written of a job's result: one table says how each kind is made."""

from __future__ import annotations

__all__ = ["LATENTS", "VIDEO"]

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from wanrun.errors import unwritable
from wanrun.files import replace_file
from wanrun.media.video_paths import video_paths

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from wanrun.generation.result import Result

VIDEO: Final = "video"
LATENTS: Final = "latents"
THUMBNAIL: Final = "thumbnail"
LAST_FRAME: Final = "last_frame"

_THUMBNAIL_PIXELS = 640
"""The longest side of a thumbnail."""


@dataclass(frozen=True)
class Output:
    """A file to write.

    Attributes:
        path: the file; of a video its suffix chooses the format, and may be that of a folder of pictures.
        video: the number of the video among those of the job, from 0; latents are those of all videos.
        kind: a key of ``KINDS``.
    """

    path: Path
    video: int = 0
    kind: str = VIDEO

    def write(self, result: Result, metadata: Mapping[str, Any], overwrite: bool) -> int:
        """Writes the file, and returns its bytes; of a folder of pictures those of all.

        Args:
            result: the result that it is of.
            metadata: the metadata of the videos, without the video's number.
            overwrite: whether an existing video is replaced; other files always are.

        Raises:
            UsageError: if it cannot be written; NoSpaceError if the disk is full.
        """
        KINDS[self.kind].write(self, result, metadata, overwrite)
        return self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the file that was written; of a folder of pictures those of all."""
        from wanrun.media.write_video import files_of

        return sum(file.stat().st_size for file in files_of(self.path))


def outputs_of(path: Path, num_videos: int, kinds: Sequence[str] = (VIDEO,)) -> tuple[Output, ...]:
    """Returns the files of a job's videos.

    Args:
        path: the video's path; several videos are ``name-0.ext``, ``name-1.ext`` and so on.
        num_videos: the number of videos.
        kinds: of each video, or of all of them together; named as the video, or as ``path``, with the ending
            of the kind.

    Raises:
        UsageError: if the suffix is not one of a video.
    """
    videos = video_paths(path, num_videos)
    return tuple(
        Output(video.with_name(f"{video.stem}{KINDS[kind].ending or video.suffix}"), number, kind)
        for kind in kinds
        for number, video in enumerate([path] if KINDS[kind].of_all else videos)
    )


def _write_video(output: Output, result: Result, metadata: Mapping[str, Any], overwrite: bool) -> None:
    """Writes a video with its metadata."""
    from wanrun.media.write_video import write_video

    facts = {**metadata, "video": output.video}
    write_video(result.frames[output.video], output.path, float(metadata["fps"]), facts, overwrite)


def _write_latents(output: Output, result: Result, metadata: Mapping[str, Any], overwrite: bool) -> None:
    """Writes the final latents of all videos as .npy, under exactly this name."""
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, result.latents)
    try:
        replace_file(output.path, buffer.getvalue())
    except OSError as error:
        what, remedy = f"the latents {output.path}", "choose another --save-latents"
        raise unwritable(what, error, remedy) from error


def _write_thumbnail(output: Output, result: Result, metadata: Mapping[str, Any], overwrite: bool) -> None:
    """Writes the first frame of a video as a small WebP."""
    small = _image(result.frames[output.video, 0])
    small.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
    _save_image(small, output.path, "WEBP", quality=80)


def _write_last_frame(output: Output, result: Result, metadata: Mapping[str, Any], overwrite: bool) -> None:
    """Writes the last frame of a video as PNG."""
    _save_image(_image(result.frames[output.video, -1]), output.path, "PNG")


def _image(frame: np.ndarray) -> Image:
    """Returns a frame, uint8 (H, W, 3), as Pillow's image."""
    from PIL import Image

    return Image.fromarray(frame)


def _save_image(image: Image, path: Path, kind: str, **options: Any) -> None:
    try:
        image.save(path, kind, **options)
    except OSError as error:
        raise unwritable(str(path), error) from error


@dataclass(frozen=True)
class _Kind:
    """A kind of file, and how it is written.

    ``write`` gets the output, the result, the metadata and whether a video may be replaced. ``ending``
    replaces the video's suffix; empty keeps it. With ``of_all`` one file is of all videos.
    """

    write: Callable[[Output, Result, Mapping[str, Any], bool], None]
    ending: str = ""
    of_all: bool = False


KINDS: Final[Mapping[str, _Kind]] = MappingProxyType(
    {
        VIDEO: _Kind(_write_video),
        LATENTS: _Kind(_write_latents, ".latents.npy", of_all=True),
        THUMBNAIL: _Kind(_write_thumbnail, ".thumbnail.webp"),
        LAST_FRAME: _Kind(_write_last_frame, ".last.png"),
    }
)
"""The kinds of files. A new kind is one row."""
