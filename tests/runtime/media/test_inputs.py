"""Arrays in the place of images and videos become Pillow images, or are refused."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from wanrun.errors import UsageError
from wanrun.media.inputs import Media, without_arrays

PIXELS = np.arange(6 * 5 * 3, dtype=np.uint8).reshape(6, 5, 3)


class Tensor:
    """An array of another library."""

    ndim = 3

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        return PIXELS


def test_arrays_become_images() -> None:
    media = Media(
        image=PIXELS,
        video=np.stack([PIXELS, PIXELS[::-1]]),
        mask=[PIXELS],
        reference_image=(PIXELS, "a.png"),  # type: ignore[arg-type]
    )
    made = without_arrays(media)
    image = Image.fromarray(PIXELS)
    assert (made.image, made.mask, made.reference_image) == (image, [image], (image, "a.png"))
    assert made.video == [image, Image.fromarray(PIXELS[::-1])]
    assert without_arrays(Media(image=Tensor())).image == image  # type: ignore[arg-type]
    assert image.size == (5, 6)


def test_media_without_arrays_are_the_same() -> None:
    media = Media(image="a.png", reference_image=(Image.new("RGB", (4, 4)),))
    assert without_arrays(media) is media


@pytest.mark.parametrize(
    "array", [PIXELS.astype(np.float32), PIXELS[..., :2], PIXELS[0], np.transpose(PIXELS, (2, 0, 1))]
)
def test_another_array_is_refused(array: np.ndarray) -> None:
    with pytest.raises(UsageError) as raised:
        without_arrays(Media(image=array))
    assert raised.value.fields == ("image",)
    assert raised.value.found == f"{array.dtype} {array.shape}"
