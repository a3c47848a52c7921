"""Decodes images by Pillow, in a child process: ``wanrun.media.decoder`` starts and ends it.

A file from outside decides how long its decoder works and how much memory that takes, and Pillow holds the
GIL meanwhile. Here nothing else waits for it. It imports little, and is ready after 60 ms.
"""

from __future__ import annotations

__all__ = ["HEIC"]

import json
import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import IO, Any, cast

from PIL import Image, ImageChops, ImageOps, ImageSequence

from wanrun.errors import UsageError

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF", "JPEG2000")
"""Pillow's names of the formats that are read. None starts a program, as EPS does. The first five need no
further module of Pillow."""

MAX_SIDE = 2**17
"""Pixels of a side. Pillow's table for scaling has 48 bytes for each: 1.4 GB for an image of one column."""

STRIP_BYTES = 2**22
"""Bytes of a frame that are passed on at a time: no process has a large one twice."""

_ORIENTATION, _SIDEWAYS = 0x0112, (5, 6, 7, 8)  # of EXIF

NOTES = "wanrun.notes"
"""The key of an image's ``info`` with notes about the parts of its file that were left out."""

HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc")
"""The brands of HEIC at the beginning of a file. AVIF shares others with it."""

_DEEP = ("I", "F")  # and I;16 with its byte orders

NO_MEMORY = ("out of memory", "allocate memory", "get_buffer() failed", "Resource temporarily unavailable")
"""The words of libraries and ffmpeg at a limit of memory."""


def too_large(name: str) -> UsageError:
    """Returns the error for an image above Pillow's limit of pixels."""
    return UsageError(
        "too_large",
        f"{name} is too large",
        expected=f"at most {Image.MAX_IMAGE_PIXELS} pixels",
        remedy="make it smaller",
    )


def check_size(size: tuple[int, int], name: str) -> None:
    """Raises UsageError for an image without pixels, or with a side that is too long."""
    found = f"{size[0]}x{size[1]}"
    if 0 in size:
        raise UsageError("damaged", f"{name} has no pixels", found=found)
    if max(size) > MAX_SIDE:
        expected = f"sides of at most {MAX_SIDE} pixels"
        raise UsageError(
            "too_large", f"{name} is too large", expected=expected, found=found, remedy="crop it"
        )


def takes_memory(name: str, limit: int) -> UsageError:
    """Returns the error for a file whose decoder reaches its limit of bytes."""
    return UsageError(
        "out_of_memory",
        f"{name} takes too much memory to decode",
        expected=f"at most {limit >> 20} MB",
        remedy="make it smaller, or save it in another format",
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
            "wrong_kind", f"{name} is not an image", expected="PNG, JPEG, WebP or another common format"
        ) from None
    except Exception as error:  # a format's own reader raises anything for a damaged file
        if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
            raise takes_memory(name, resource.getrlimit(resource.RLIMIT_DATA)[0]) from None
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UsageError("damaged", f"{name} is damaged", found=reason, remedy="save it again") from None


def rgb(image: Image.Image, name: str) -> Image.Image:
    """Returns one decoded frame as RGB with 8 bits a channel; it is not rotated.

    Transparency is dropped, as ``load_image`` does: the colours under it show. A single transparent colour
    stays in the image's ``info``, for ``on_white``. CMYK, palettes and one bit are converted. Raises
    UsageError as ``check_size``, and for a greyscale image with 16 or 32 bits, which Pillow would clip at
    255: mostly to white.
    """
    _check_header(image, name)
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def _check_header(image: Image.Image, name: str) -> None:
    """Raises UsageError for what is seen before the pixels are: the depth, and the size."""
    if image.mode in _DEEP or image.mode.startswith("I;"):
        raise UsageError(
            "unsupported",
            f"{name} has more than 8 bits a pixel",
            expected="8 bits a channel",
            found=f"greyscale of 16 or 32 bits ({image.mode})",
            remedy="save it with 8 bits",
        )
    check_size(image.size, name)


_WHITE = 240
"""The darkest grey that counts as white paint, of 255."""


def mask(image: Image.Image, name: str) -> Image.Image:
    """Returns one decoded frame of a mask as RGB; one that is drawn as transparency is read by its alpha.

    What is painted in white on a transparent layer is white; of a layer without paint, as where an object has
    left the picture, nothing is. In any other picture what was made transparent is, as where a part was
    erased. Without transparency a frame is as of ``rgb``, whose errors are raised.
    """
    found = rgb(image, name)
    if not image.has_transparency_data:
        return found
    layer = image.convert("RGBA")
    alpha = layer.getchannel("A")
    least, most = _extrema(alpha)
    if least == 255:
        return found
    on_white = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("L")
    painted_white = most == 0 or _extrema(on_white)[0] >= _WHITE
    drawn = alpha if painted_white else ImageChops.invert(alpha)
    return Image.merge("RGB", [drawn] * 3)


def _extrema(channel: Image.Image) -> tuple[int, int]:
    return cast(tuple[int, int], channel.getextrema())


Convert = Callable[[Image.Image, str], Image.Image]

CONVERSIONS: Mapping[str, Convert] = MappingProxyType({"rgb": rgb, "mask": mask})
"""What a frame becomes."""


def notes_of(image: Image.Image) -> tuple[str, ...]:
    """Returns notes about the parts of a decoded image that ``rgb`` leaves out, one line each."""
    notes = list[str]()
    # A photo of several pictures, such as an iPhone's with its brightness, is no animation.
    if getattr(image, "is_animated", False) and image.format not in ("JPEG", "MPO"):
        notes.append("the first frame of the animation is taken")
    if image.has_transparency_data:
        opaque = image.convert("RGBA").getchannel("A").histogram()[255]
        if opaque < image.width * image.height:
            notes.append("transparency is left out, and the colours under it show")
    return tuple(notes)


def main() -> None:
    """Answers requests, a line of JSON each, with frames: as PPM, its comment what ``info`` has to tell.

    The arguments are the most pixels of an image, 0 for no limit, and one of ``CONVERSIONS``. A request has
    ``path``, the ``name`` for messages, and what is ``wanted``: the ``first`` frame, ``all`` frames, after
    which an empty line follows, or only the ``size``, which is answered as a line of JSON: an object with
    ``width`` and ``height``. In place of each there may be another line of JSON: an error's four parts, or an
    object without any if it is not an image.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    Image.MAX_IMAGE_PIXELS = int(sys.argv[1]) or None
    convert = CONVERSIONS[sys.argv[2]]
    try:
        for line in sys.stdin.buffer:
            _answer(json.loads(line), answers, convert)
            answers.flush()
    except BrokenPipeError:
        os._exit(0)  # nobody wants the rest


def _answer(request: dict[str, Any], answers: IO[bytes], convert: Convert) -> None:
    path, name, told = request["path"], request["name"], dict[str, Any]()
    try:
        if request["wanted"] == "first":
            write_ppm(_first(path, name, convert), answers)
            return
        if request["wanted"] == "size":
            told = _size(path, name)
        elif (image := _opened(path, name)) is not None:
            for frame in _all(image, name, convert):
                write_ppm(frame, answers)
            answers.write(b"\n")
            return
    except UsageError as error:
        told = error.parts
    answers.write(json.dumps(told, default=str).encode() + b"\n")


def _size(path: str, name: str) -> dict[str, Any]:
    """Returns width and height of an image, upright, as its header has them; no pixel is decoded."""
    with decoding(name):
        image = _open(path, name)
        _check_header(image, name)
        # A PNG would be decoded for an orientation after its pixels.
        orientation = image.getexif().get(_ORIENTATION) if image.format != "PNG" else None
        width, height = image.size if orientation not in _SIDEWAYS else image.size[::-1]
        return {"width": width, "height": height}


def _first(path: str, name: str, convert: Convert) -> Image.Image:
    """Returns an image, or the first frame of an animation, turned as its EXIF orientation says."""
    with decoding(name):
        image = _open(path, name)
        image.load()
        notes = notes_of(image)
        ImageOps.exif_transpose(image, in_place=True)
        found = convert(image, name)
        found.info[NOTES] = notes
        return found


def _open(path: str, name: str) -> Image.Image:
    """Opens an image; refuses a photo in HEIC if the package that reads it is not installed."""
    with open(path, "rb") as file:  # noqa: PTH123
        head = file.read(32)  # the kind of an ISO media file, and some of those that it is compatible with
    if head[4:8] != b"ftyp" or not any(brand in head for brand in HEIC):
        return Image.open(path, formats=FORMATS)
    try:
        import pillow_heif
    except ModuleNotFoundError:
        raise UsageError(
            "wrong_kind",
            f"{name} is a photo in HEIC, which Pillow does not read",
            remedy="save it as JPEG; where wanrun runs, pip install '.[heif]' lets it read such photos",
        ) from None
    pillow_heif.register_heif_opener()
    return Image.open(path, formats=("HEIF",))


def _opened(path: str, name: str) -> Image.Image | None:
    """Returns an animation whose frames are not decoded yet; None if it is not an image."""
    with decoding(name):
        try:
            return _open(path, name)
        except Image.UnidentifiedImageError:
            return None


def _all(image: Image.Image, name: str, convert: Convert) -> Iterator[Image.Image]:
    frames = ImageSequence.Iterator(image)
    while True:
        with decoding(name):
            try:
                frame = convert(next(frames), name)
            except StopIteration:
                return
        yield frame


def write_ppm(image: Image.Image, answers: IO[bytes]) -> None:
    """Writes an image in mode RGB as binary PPM, its comment the entries of ``info`` that others look at."""
    answers.write(b"P6\n")
    told = ((key, image.info.get(key)) for key in (NOTES, "transparency"))
    if info := {key: value for key, value in told if value not in (None, ())}:
        answers.write(f"#{info!r}\n".encode())
    answers.write(f"{image.width} {image.height}\n255\n".encode())
    rows = strip_rows(image.width)
    for top in range(0, image.height, rows):
        answers.write(image.crop((0, top, image.width, min(top + rows, image.height))).tobytes())


def strip_rows(width: int) -> int:
    """Returns how many rows of a frame are passed on at a time."""
    return max(1, STRIP_BYTES // (3 * width))


if __name__ == "__main__":
    main()
