"""Reads images as diffusers' ``load_image`` does, and refuses damaged or unusual ones with one line."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from PIL import Image, ImageOps

from wanrun.artifact.media import ImageSource
from wanrun.errors import UsageError, wrong_type
from wanrun.files import open_regular
from wanrun.media import decoder
from wanrun.media.decoder import DecoderProcess
from wanrun.media.inputs import url_error
from wanrun.media.pillow import CONVERSIONS, NOTES, Convert, decoding, notes_of
from wanrun.opened.cancel import CancelToken

Seen = Callable[[bytes], object]
"""Gets the bytes that identify an image or video, piece by piece, such as the ``update`` of a digest."""

MAX_BYTES = 2**35
"""The largest file, in bytes. All of it is read for a digest, which takes 20 to 60 s for this size."""


def described(source: object, option: str) -> str:
    """Returns the option and the file, if the source is one, for messages."""
    return f"{option} {source}" if isinstance(source, Path | str) else option


def existing_path(source: Path | str, option: str) -> Path:
    """Returns the path of a folder or of a readable file that is not empty; else raises UsageError."""
    path, found = Path(source), None
    if (refusal := url_error(str(source), option)) is not None:
        raise refusal
    try:
        if path.is_file():
            with open_regular(path, MAX_BYTES) as file:
                found = None if file.read(1) else "an empty file"
        elif not path.is_dir() and path.exists():
            found = "neither a file nor a folder"
        elif not path.is_dir():
            what = f"{described(source, option)} cannot be read"
            raise UsageError("missing_file", what, found="no such file or folder")
    except OSError as error:
        found = error.strerror
    if found is not None:
        raise UsageError("unreadable", f"{described(source, option)} cannot be read", found=found)
    return path


def on_white(image: Image.Image, name: str) -> Image.Image:
    """Returns an image of ``rgb`` with its transparent colour made white: transformers' ``convert_to_rgb``.

    A PNG or GIF file can name one colour, or one index of the palette, as transparent. Pillow keeps it in
    ``info`` when the image becomes RGB. transformers looks there, diffusers does not: CLIP is given white,
    and the VAE the colour itself. Raises UsageError if ``info`` has no colour there, which is possible for an
    image in memory.
    """
    if image.info.get("transparency") is None:
        return image
    with decoding(name):
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def identity(file: Path | int, name: str) -> tuple[int, ...]:
    """Returns numbers that change when a file, given by path or descriptor, is changed or replaced.

    Raises UsageError if the file is gone.
    """
    try:
        status = os.stat(file)  # noqa: PTH116 - or a descriptor
    except OSError as error:
        raise UsageError("unreadable", f"{name} cannot be read", found=error.strerror) from None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def tell_file(path: Path, name: str, before: tuple[int, ...], seen: Seen) -> None:
    """Passes a file's bytes to ``seen`` after the file was decoded.

    Decoders get the file's name, as in the reference, because Pillow does not turn all images from memory as
    it turns those from files. Hence the comparison with the identity before decoding: it shows that these are
    the decoded bytes. Raises UsageError if the file cannot be read, or if its ``identity`` is no longer
    ``before``.
    """
    try:
        with open_regular(path) as file:
            while file.tell() <= before[2] and (piece := file.read(1 << 20)):  # no more, if it grows
                seen(piece)
            now = identity(file.fileno(), name)
    except OSError as error:
        raise UsageError("unreadable", f"{name} cannot be read", found=error.strerror) from None
    if now != before:
        raise UsageError("changed", f"{name} was changed while it was read", remedy="run it again")


def file_digest(source: Path | str, option: str) -> str:
    """Returns the sha256 of the file of an image or video, without decoding.

    Raises UsageError if the file is missing, a folder, empty, or cannot be read.
    """
    name, digest = described(source, option), hashlib.sha256()
    path = _image_path(source, option)
    tell_file(path, name, identity(path, name), digest.update)
    return digest.hexdigest()


def _image_path(source: object, option: str) -> Path:
    if not isinstance(source, Path | str):
        raise wrong_type(option, "a path, a Pillow image or an array", source)
    path = existing_path(source, option)
    if path.is_dir():
        raise UsageError(
            "wrong_kind", f"{described(source, option)} cannot be read", expected="an image", found="a folder"
        )
    return path


def read_image(
    source: ImageSource,
    option: str,
    seen: Seen | None = None,
    *,
    images: DecoderProcess | None = None,
    cancel: CancelToken | None = None,
    mask: bool = False,
) -> Image.Image:
    """Reads and decodes a whole image, as diffusers' ``utils.load_image`` does.

    Returns it in mode RGB, turned as its EXIF orientation says; the first frame of an animation. Colour
    images of 16 bits a channel keep the upper 8.

    Args:
        option: the option's name as the user writes it, for messages.
        seen: gets the bytes that are decoded: the file's; of an image in memory the size, the pixels that are
            returned, and the transparent colour if there is one.
        images: decodes several files; without it a file has its own process.
        mask: whether it is a mask in memory, or a file of one without ``images``, which may be drawn as
            transparency (``wanrun.media.pillow.mask``).

    Raises CancelledError once ``cancel`` is cancelled; UsageError if the image is missing, a folder, empty,
    damaged, cut short, not an image, above Pillow's limit of size, greyscale with more than 8 bits, or
    without pixels, if it takes more time or memory to decode than a file may, if the file was changed while
    it was read, or if the source is of another type.
    """
    name = described(source, option)
    if isinstance(source, Image.Image):
        return _in_memory(source, name, seen, CONVERSIONS["mask" if mask else "rgb"])
    path = _image_path(source, option)
    before = identity(path, name)
    with nullcontext(images) if images is not None else decoder.images(name, cancel, mask) as started:
        found = decoder.first_frame(started, path, name)
    if seen is not None:
        tell_file(path, name, before, seen)
    return found


def probe_image(source: ImageSource, option: str, cancel: CancelToken | None = None) -> tuple[int, int]:
    """Returns width and height of an image by its header, after all checks that need no pixel.

    Raises as ``read_image``, but not for pixels that are damaged or cut short.
    """
    name = described(source, option)
    if isinstance(source, Image.Image):
        return _in_memory(source, name, None, CONVERSIONS["rgb"]).size
    path = _image_path(source, option)
    with decoder.images(name, cancel) as started:
        return decoder.image_size(started, path, name)


def left_out(image: Image.Image) -> tuple[str, ...]:
    """Returns notes about the parts of an image that ``read_image`` left out, one line each."""
    notes: tuple[str, ...] = image.info.get(NOTES, ())
    return notes


def _in_memory(source: Image.Image, name: str, seen: Seen | None, convert: Convert) -> Image.Image:
    """Decodes an image of Python's caller, in this process."""
    with decoding(name):
        source.load()
        found = convert(ImageOps.exif_transpose(source), name)
        found.info[NOTES] = notes_of(source)
    if seen is not None:
        seen(f"{found.width}x{found.height}\n".encode())
        seen(found.tobytes())
        if (colour := found.info.get("transparency")) is not None:
            seen(f"transparent {colour}\n".encode())
    return found
