"""Reads videos from files and folders of images: the same frames as diffusers' ``load_video``."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from PIL import Image, UnidentifiedImageError

from wanrun.artifact.media import VideoSource
from wanrun.errors import UsageError, wrong_type
from wanrun.media.decoder import all_frames, decoder, images, memory_limit
from wanrun.media.ffmpeg import find_ffmpeg, how_it_ended
from wanrun.media.images import Seen, described, existing_path, file_digest, identity, read_image, tell_file
from wanrun.media.pillow import NO_MEMORY, takes_memory, too_large
from wanrun.media.pillow import mask as drawn_mask
from wanrun.opened.cancel import CancelToken

_CONTAINERS = "mov,matroska,webm,avi,mpegts,mpeg,ogg,flv,asf,ivf,h264,hevc,mpegvideo,yuv4mpegpipe,mjpeg"
"""ffmpeg's names of the containers that are read. Playlists and scripts are refused: they name more files."""

_VPX = MappingProxyType({"vp8": "libvpx", "vp9": "libvpx-vp9"})
"""The decoders that read the alpha of VP8 and VP9, by ffmpeg's name of the codec."""

_TRANSPARENT = re.compile(r"\b(?:yuva|rgba|bgra|argb|abgr|gbrap|ya8|ya16|pal8)")
"""A pixel format with alpha, in ffmpeg's description of a stream."""

THREADS = 4
"""Of ffmpeg, at most: each keeps frames, so the memory that it takes would grow with the machine's cores."""


def read_video(
    source: VideoSource,
    option: str,
    max_frames: int | None = None,
    seen: Seen | None = None,
    cancel: CancelToken | None = None,
    mask: bool = False,
) -> Iterator[Image.Image]:
    """Reads the frames of a video one by one.

    Yields frames in mode RGB, all of one size. Images of folders and lists are turned as their EXIF
    orientation says. A file with a variable frame rate is read as diffusers reads it: ffmpeg repeats and
    drops frames to space them evenly.

    Args:
        source: a file that ffmpeg or Pillow can read (mp4, webm, gif, webp, apng, ...); a folder of images,
            in the natural order of their names (2 before 10) and without hidden files; or a list of images.
        option: the option's name as the user writes it, for messages.
        max_frames: stops after this many frames; later frames are not decoded.
        seen: gets the bytes that identify the video: all bytes of a file, after the last frame; the names and
            digests of a folder's frames; the sizes and pixels of a list's images.
        mask: whether it is a mask, whose frames may be drawn as transparency (``wanrun.media.pillow.mask``).

    Raises CancelledError once ``cancel`` is cancelled; UsageError if the video is missing, empty, damaged,
    cut short, has no frames, frames that differ in size or are above Pillow's limit of size, if it takes more
    time or memory to decode than a file may, if the file was changed while it was read, or if the source is
    of another type.
    """
    frames: Iterator[Image.Image]
    if isinstance(source, list | tuple):
        frames = _listed_frames(source[:max_frames], option, seen, cancel, mask)
    elif not isinstance(source, Path | str):
        raise wrong_type(option, "a path, a list of images or an array", source)
    elif (path := existing_path(source, option)).is_dir():
        frames = _folder_frames(path, option, max_frames, seen, cancel, mask)
    else:
        frames = _file_frames(path, option, max_frames, seen, cancel, mask)
    return _same_size(frames, source, option)


def video_digest(source: Path | str, option: str, max_frames: int | None = None) -> str:
    """Returns the sha256 of the bytes that ``read_video`` passes to ``seen``, without decoding.

    Raises UsageError if the video is missing, empty, or cannot be read.
    """
    path = existing_path(source, option)
    if path.is_dir():
        digest = hashlib.sha256()
        for file in folder_files(path, option)[:max_frames]:
            digest.update(_folder_entry(file, file_digest(file, option)))
        return digest.hexdigest()
    return file_digest(path, option)


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Returns a key that sorts names by the numbers in them: frame2 before frame10."""
    parts = re.split("([0-9]+)", name)  # text and numbers in turn; int() would take other digits too
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], name


def folder_files(path: Path, option: str) -> list[Path]:
    """Returns the files of a folder of frames in natural order, without hidden files.

    Raises UsageError if the folder cannot be listed.
    """
    try:
        return sorted(
            (file for file in path.iterdir() if not file.name.startswith(".")),
            key=lambda file: natural_key(file.name),
        )
    except OSError as error:
        raise UsageError(
            "unreadable", f"{described(path, option)} cannot be read", found=error.strerror
        ) from None


def _listed_frames(
    source: Sequence[Image.Image], option: str, seen: Seen | None, cancel: CancelToken | None, mask: bool
) -> Iterator[Image.Image]:
    files = any(isinstance(image, Path | str) for image in source)
    with images(option, cancel, mask) if files else nullcontext() as decoder:
        for image in source:
            yield read_image(image, option, seen, images=decoder, mask=mask)


def _folder_frames(
    path: Path, option: str, max_frames: int | None, seen: Seen | None, cancel: CancelToken | None, mask: bool
) -> Iterator[Image.Image]:
    files = folder_files(path, option)[:max_frames]
    with images(described(path, option), cancel, mask) as decoder:
        for file in files:
            digest = hashlib.sha256()
            frame = read_image(file, option, digest.update, images=decoder)
            if seen is not None:
                seen(_folder_entry(file, digest.hexdigest()))
            yield frame


def _folder_entry(file: Path, digest: str) -> bytes:
    """Returns the bytes that a frame's file adds to the digest of its folder."""
    return f"{file.name}\0{digest}\n".encode("utf-8", "surrogateescape")


def _same_size(frames: Iterator[Image.Image], source: VideoSource, option: str) -> Iterator[Image.Image]:
    """Yields the frames, and checks that there is at least one and that all have the first one's size."""
    size, number = None, 0
    for number, frame in enumerate(frames, 1):
        size = size or frame.size
        if frame.size != size:
            raise UsageError(
                "mismatch",
                f"the frames of {described(source, option)} differ in size",
                expected=f"{size[0]}x{size[1]}, as the first",
                found=f"{frame.width}x{frame.height}, frame {number}",
            )
        yield frame
    if number == 0:
        raise UsageError(
            "damaged", f"{described(source, option)} has no frames", expected="a video or a folder of images"
        )


def _file_frames(
    path: Path, option: str, max_frames: int | None, seen: Seen | None, cancel: CancelToken | None, mask: bool
) -> Iterator[Image.Image]:
    name = described(path, option)
    before = identity(path, name)
    yield from _decoded(path, name, max_frames, cancel, mask)
    if seen is not None:
        # The digest is of the file that was decoded: tell_file refuses one that changed since ``before``.
        tell_file(path, name, before, seen)


def _decoded(
    path: Path, name: str, max_frames: int | None, cancel: CancelToken | None, mask: bool
) -> Iterator[Image.Image]:
    """Yields frames from Pillow if it reads the format, else from ffmpeg."""
    try:
        with images(name, cancel, mask) as decoder:
            yield from islice(all_frames(decoder, path, name), max_frames)
    except UnidentifiedImageError:
        alpha = _alpha(path, name, cancel) if mask else None
        if alpha is None:
            yield from _ffmpeg_frames(path, name, max_frames, cancel)
        else:
            for frame in _ffmpeg_frames(path, name, max_frames, cancel, alpha.before, alpha.after):
                yield drawn_mask(_with_alpha(frame), name)


@dataclass(frozen=True)
class _Alpha:
    """The options of ffmpeg, before and after the input, that put each frame's alpha at its right side."""

    before: Sequence[str]
    after: Sequence[str] = (
        "-vf",
        "format=rgba,split[colours][b];[b]alphaextract,format=rgb24[alpha];"
        "[colours]format=rgb24[left];[left][alpha]hstack",
    )


def _alpha(path: Path, name: str, cancel: CancelToken | None) -> _Alpha | None:
    """Returns how a video's transparency is decoded; None for a video without."""
    with decoder([_program(name), "-nostdin", "-hide_banner", *_input(path)], name, cancel) as ffmpeg:
        _, lines = ffmpeg.ended(name)  # it describes the file, and misses an output
    streams = [line for line in lines if "Video:" in line and "Stream #" in line]  # and no title
    if streams and any(re.search(r"alpha_mode +: 1$", line) for line in lines):
        # ffmpeg's own decoders of VP8 and VP9 leave the second stream of pictures, with the alpha, out.
        return next(
            (_Alpha(("-c:v", lib)) for codec, lib in _VPX.items() if f"Video: {codec}" in streams[0]), None
        )
    return _Alpha(()) if streams and _TRANSPARENT.search(streams[0]) else None


def _with_alpha(frame: Image.Image) -> Image.Image:
    """Returns a frame with the alpha that is at its right side."""
    width, height = frame.width // 2, frame.height
    layer = frame.crop((0, 0, width, height))
    layer.putalpha(frame.crop((width, 0, 2 * width, height)).getchannel("R"))
    return layer


def _input(path: Path) -> Sequence[str]:
    return ("-protocol_whitelist", "file", "-format_whitelist", _CONTAINERS, "-i", f"file:{path.absolute()}")


def _ffmpeg_frames(
    path: Path,
    name: str,
    max_frames: int | None,
    cancel: CancelToken | None,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> Iterator[Image.Image]:
    """Yields frames from imageio's ffmpeg, with the conversion and frame timing of imageio's reader."""
    # diffusers uses that reader itself. The reader ignores ffmpeg's exit status: of a file that is cut short
    # it returns the first part, without an error.
    limit = [] if max_frames is None else ["-frames:v", str(max_frames)]
    most = Image.MAX_IMAGE_PIXELS
    # Decoders round sizes up, so this limit has room. read_ppm refuses sizes between the two limits.
    pixels = [] if most is None else ["-max_pixels", str(most * 9 // 8 + 2**16)]
    command = [
        *(_program(name), "-nostdin", "-v", "error", "-xerror", *pixels),
        *("-threads", str(min(THREADS, os.cpu_count() or 1))),
        *(*before, *_input(path), *after),
        # One PPM image per frame, because its header has the size.
        *("-pix_fmt", "rgb24", "-vcodec", "ppm", *limit, "-f", "image2pipe", "-"),
    ]
    with decoder(command, name, cancel) as ffmpeg:
        while ffmpeg.line() == b"P6\n" and (frame := ffmpeg.frame(name)) is not None:
            yield frame
        code, lines = ffmpeg.ended(name)
    if code and any("max pixel count" in line for line in lines):
        raise too_large(name)
    if code and any(words in line for line in lines for words in NO_MEMORY):
        raise takes_memory(name, memory_limit())
    # ffmpeg exits with 0 when a Matroska file is cut short.
    if code or any("ended prematurely" in line for line in lines):
        reason = re.sub(r"\[[^]]*\] *", "", lines[0]) if lines else how_it_ended(code)
        raise UsageError(
            "damaged",
            f"{name} is damaged, or not a video with pictures",
            found=f"ffmpeg: {reason}",
            remedy="encode it again, or give a folder of images",
        )


def _program(name: str) -> str:
    """Returns the path of ffmpeg."""
    try:
        return find_ffmpeg()
    except UsageError as error:
        raise UsageError(
            "not_installed",
            f"{name} cannot be read: {error.what}",
            found=error.found,
            remedy=f"{error.remedy}, or give a folder of images",
        ) from None
