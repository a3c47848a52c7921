"""The preparations that a manifest may name: each makes a program's input from an image or a frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from wanrun.artifact.media import FITS
from wanrun.artifact.task import Preparation
from wanrun.errors import UsageError
from wanrun.media.processors import (
    cropped,
    cropped_size,
    filled,
    filled_size,
    greyscale,
    reference_canvas,
    reference_size,
    resized,
    scaled_size,
)

MOST_SQUEEZED = 1.2
"""By how much an image may be stretched along one side without a word: 3:2 becomes 832x480 by 1.16."""


@dataclass(frozen=True)
class Canvas:
    """The size in pixels that an image or a frame is brought to.

    ``spatial`` are the pixels of a latent cell's side; widths and heights are multiples of ``multiple``.
    ``title`` names the image or video in messages. ``fit`` is how one of another shape is brought to the
    size.
    """

    width: int
    height: int
    spatial: int
    multiple: int
    title: str
    fit: str = FITS[0]

    def squeezes(self, width: int, height: int) -> bool:
        """Whether stretching an image of this size to the canvas's changes its shape visibly."""
        ratio = (self.width * height) / (self.height * width)
        return self.fit == "stretch" and not 1 / MOST_SQUEEZED <= ratio <= MOST_SQUEEZED


@dataclass(frozen=True)
class Prepared:
    """A preparation: how an image becomes a program's input.

    ``process`` makes an array (height, width, ...) of the canvas's size from an image in mode RGB; it raises
    UsageError for an image that cannot be brought to this size. ``check`` raises that error by the width and
    height of an image only. ``channels`` are the axes after height and width.
    """

    process: Callable[[Image.Image, Canvas], np.ndarray]
    check: Callable[[tuple[int, int], Canvas], object] = lambda size, canvas: None
    channels: tuple[int, ...] = (3,)
    dtype: type[np.generic] = np.uint8

    def shape(self, canvas: Canvas) -> tuple[int, ...]:
        """Returns the array's shape (height, width, ...)."""
        return (canvas.height, canvas.width, *self.channels)

    def empty(self, count: int, canvas: Canvas) -> np.ndarray[Any, Any]:
        """Returns an uninitialised array for ``count`` images, (count, height, width, ...)."""
        return np.empty((count, *self.shape(canvas)), self.dtype)


def _resize_same_aspect(image: Image.Image, canvas: Canvas) -> np.ndarray:
    """Scales an image whose size fits."""
    _check_aspect(image.size, canvas)
    return resized(image, canvas.width, canvas.height)


def _check_aspect(size: tuple[int, int], canvas: Canvas) -> None:
    """Raises UsageError unless frames of this size condition all of the video."""
    wanted = f"{canvas.width}x{canvas.height}"
    scaled = scaled_size(*size, canvas.width, canvas.height, canvas.multiple, canvas.spatial)
    if scaled != (canvas.width, canvas.height):
        # The reference continues with this size, but programs take the profile's size only.
        width, height = scaled
        other = f", or use a profile of {width}x{height}" if width and height else ""
        raise UsageError(
            "mismatch",
            f"the frames of {canvas.title} do not fit the profile",
            expected=f"{wanted}, or larger ones of its aspect ratio",
            found=f"{size[0]}x{size[1]}, which becomes {width}x{height}",
            remedy=f"scale or crop the video to {wanted}{other}",
        )


def _fitted(image: Image.Image, canvas: Canvas) -> np.ndarray:
    """Brings an image to a size as ``fit`` says."""
    if canvas.fit == "crop":
        return cropped(image, canvas.width, canvas.height, canvas.title)
    if canvas.fit == "pad":
        return filled(image, canvas.width, canvas.height, canvas.title)
    return resized(image, canvas.width, canvas.height)


def _check_fit(size: tuple[int, int], canvas: Canvas) -> None:
    """Raises UsageError for an image that ``fit`` cannot bring to a size."""
    if canvas.fit == "crop":
        cropped_size(size, canvas.width, canvas.height, canvas.title)
    if canvas.fit == "pad":
        filled_size(size, canvas.width, canvas.height, canvas.title)


PREPARATIONS: Mapping[Preparation, Prepared] = MappingProxyType(
    {
        "resize": Prepared(_fitted, _check_fit),
        "resize_same_aspect": Prepared(_resize_same_aspect, _check_aspect),
        "fit_on_black": Prepared(
            lambda image, to: filled(image, to.width, to.height, to.title),
            lambda size, to: filled_size(size, to.width, to.height, to.title),
        ),
        "fit_on_white": Prepared(
            lambda image, to: reference_canvas(image, to.width, to.height, to.spatial, to.title),
            lambda size, to: reference_size(size, to.width, to.height, to.spatial, to.title),
            dtype=np.float32,
        ),
        "greyscale": Prepared(lambda image, to: greyscale(_fitted(image, to)), _check_fit, channels=()),
    }
)
"""The preparations by their names in the manifest."""
