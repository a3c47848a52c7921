"""Images and videos that Python gives as arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import structs

from wanrun.artifact.media import MEDIA_KINDS, Media
from wanrun.errors import UsageError, field

if TYPE_CHECKING:
    from PIL.Image import Image


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
