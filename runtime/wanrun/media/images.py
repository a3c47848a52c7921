"""Reads images as diffusers' ``load_image`` does, and refuses damaged or unusual ones with one line."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageOps

from wanrun.artifact.media import ImageSource
from wanrun.errors import UsageError, wrong_type
from wanrun.files import open_regular

Seen = Callable[[bytes], object]
"""Gets the bytes that identify an image or video, piece by piece, such as the ``update`` of a digest."""

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF", "JPEG2000")
"""Pillow's names of the formats that are read. None starts a program, as EPS does. The first five need no
further module of Pillow."""

MAX_BYTES = 2**35
"""The largest file, in bytes. All of it is read for a digest, which takes 20 to 60 s for this size."""

_URL = re.compile(r"(https?|ftp|s3|gs|data):")

_DEEP = ("I", "F")  # and I;16 with its byte orders


def described(source: object, option: str) -> str:
    """Returns the option and the file, if the source is one, for messages."""
    return f"{option} {source}" if isinstance(source, Path | str) else option


def existing_path(source: Path | str, option: str) -> Path:
    """Returns the path of a folder, or of a file that can be read and is not empty.

    Raises:
        UsageError: if the source is neither.
    """
    path, found = Path(source), None
    if _URL.match(str(source)):
        raise UsageError(
            f"{described(source, option)} is a URL, and URLs are not fetched",
            remedy="download it first, and give the file",
        )
    try:
        if path.is_file():
            with open_regular(path, MAX_BYTES) as file:
                found = None if file.read(1) else "an empty file"
        elif not path.is_dir():
            found = "neither a file nor a folder" if path.exists() else "no such file or folder"
    except OSError as error:
        found = error.strerror
    if found is not None:
        raise UsageError(f"{described(source, option)} cannot be read", found=found)
    return path


def too_large(name: str) -> UsageError:
    """Returns the error for an image above Pillow's limit of pixels."""
    return UsageError(
        f"{name} is too large", expected=f"at most {Image.MAX_IMAGE_PIXELS} pixels", remedy="make it smaller"
    )


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Turns Pillow's exceptions for a bad image into a UsageError that starts with ``name``."""
    try:
        with warnings.catch_warnings():
            # Pillow warns of unusual metadata and palettes, which the reference reads too.
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except UsageError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise too_large(name) from None
    except Image.UnidentifiedImageError:
        raise UsageError(
            f"{name} is not an image", expected="PNG, JPEG, WebP or another common format"
        ) from None
    except Exception as error:  # a format's own reader raises anything for a damaged file
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UsageError(f"{name} is damaged", found=reason, remedy="save it again") from None


def rgb(image: Image.Image, name: str) -> Image.Image:
    """Returns one decoded frame as RGB with 8 bits a channel; it is not rotated.

    Transparency is dropped, as ``load_image`` does: the colours under it show. A single transparent colour
    stays in the image's ``info``, for ``on_white``. CMYK, palettes and one bit are converted.

    Raises:
        UsageError: for an image without pixels, and for a greyscale image with 16 or 32 bits, which Pillow
            would clip at 255, that is mostly to white.
    """
    if image.mode in _DEEP or image.mode.startswith("I;"):
        raise UsageError(
            f"{name} has more than 8 bits a pixel",
            expected="8 bits a channel",
            found=f"greyscale of 16 or 32 bits ({image.mode})",
            remedy="save it with 8 bits",
        )
    if 0 in image.size:
        raise UsageError(f"{name} has no pixels", found=f"{image.width}x{image.height}")
    return image.convert("RGB")


def on_white(image: Image.Image, name: str) -> Image.Image:
    """Returns an image of ``rgb`` with its transparent colour made white: transformers' ``convert_to_rgb``.

    A PNG or GIF file can name one colour, or one index of the palette, as transparent. Pillow keeps it in
    ``info`` when the image becomes RGB. transformers looks there, diffusers does not: CLIP is given white,
    and the VAE the colour itself.

    Raises:
        UsageError: if ``info`` has no colour there, which is possible for an image in memory.
    """
    if image.info.get("transparency") is None:
        return image
    with decoding(name):
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def identity(file: Path | int, name: str) -> tuple[int, ...]:
    """Returns numbers that change when a file, given by path or descriptor, is changed or replaced.

    Raises:
        UsageError: if the file is gone.
    """
    try:
        status = os.stat(file)  # noqa: PTH116 - or a descriptor
    except OSError as error:
        raise UsageError(f"{name} cannot be read", found=error.strerror) from None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def tell_file(path: Path, name: str, before: tuple[int, ...], seen: Seen) -> None:
    """Passes a file's bytes to ``seen`` after the file was decoded.

    Decoders get the file's name, as in the reference, because Pillow does not turn all images from memory as
    it turns those from files. Hence the comparison with the identity before decoding: it shows that these
    are the decoded bytes.

    Raises:
        UsageError: if the file cannot be read, or if its ``identity`` is no longer ``before``.
    """
    try:
        with open_regular(path) as file:
            while file.tell() <= before[2] and (piece := file.read(1 << 20)):  # no more, if it grows
                seen(piece)
            now = identity(file.fileno(), name)
    except OSError as error:
        raise UsageError(f"{name} cannot be read", found=error.strerror) from None
    if now != before:
        raise UsageError(f"{name} was changed while it was read", remedy="run it again")


def file_digest(source: Path | str, option: str) -> str:
    """Returns the sha256 of the file of an image or video, without decoding.

    Raises:
        UsageError: if the file is missing, a folder, empty, or cannot be read.
    """
    name, digest = described(source, option), hashlib.sha256()
    path = _image_path(source, option)
    tell_file(path, name, identity(path, name), digest.update)
    return digest.hexdigest()


def _image_path(source: Path | str, option: str) -> Path:
    path = existing_path(source, option)
    if path.is_dir():
        raise UsageError(f"{described(source, option)} cannot be read", expected="an image", found="a folder")
    return path


def read_image(source: ImageSource, option: str, seen: Seen | None = None) -> Image.Image:
    """Reads and decodes a whole image, as diffusers' ``utils.load_image`` does.

    Args:
        source: a file, or an image in memory.
        option: the option's name as the user writes it, for messages.
        seen: gets the bytes that are decoded: the file's; of an image in memory the size, the pixels that
            are returned, and the transparent colour if there is one.

    Returns:
        The image in mode RGB, turned as its EXIF orientation says; the first frame of an animation. Colour
        images of 16 bits a channel keep the upper 8.

    Raises:
        UsageError: if it is missing, a folder, empty, damaged, cut short, no image, above Pillow's limit of
            size, greyscale with more than 8 bits, or without pixels, if the file was changed while it was
            read, or if the source is of another type.
    """
    name = described(source, option)
    if not isinstance(source, Path | str | Image.Image):
        raise wrong_type(option, "a path or a Pillow image", source)
    if not isinstance(source, Image.Image):
        path = _image_path(source, option)
        before = identity(path, name)
        with decoding(name), Image.open(path, formats=FORMATS) as image:
            found = _upright(image, name)
        if seen is not None:
            tell_file(path, name, before, seen)
        return found
    with decoding(name):
        found = _upright(source, name)
    if seen is not None:
        seen(f"{found.width}x{found.height}\n".encode())
        seen(found.tobytes())
        if (colour := found.info.get("transparency")) is not None:
            seen(f"transparent {colour}\n".encode())
    return found


def _upright(image: Image.Image, name: str) -> Image.Image:
    image.load()
    return rgb(ImageOps.exif_transpose(image), name)
