"""Scales, crops and normalises images for the programs as the reference's processors do, without torch.

The reference is diffusers 0.42.1, and transformers' CLIPImageProcessor on Pillow, which is what diffusers
loads where torchvision is not installed. With torchvision up to 0.7 % of the scaled pixels differ, by one of
255. All images are in mode RGB; a transparent colour in their ``info`` is only looked at for CLIP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from wanrun.artifact.model import ImageProcessor
from wanrun.errors import UsageError
from wanrun.media.images import on_white

_LANCZOS = Image.Resampling.LANCZOS
_MAX_STRETCHED_PIXELS = 2**26  # an image of one row would take gigabytes after its short edge is scaled up


def resized(image: Image.Image, width: int, height: int) -> np.ndarray:
    """Scales an image to a size, whatever its aspect ratio: ``VaeImageProcessor.preprocess``.

    Returns uint8 (height, width, 3). An image that has this size is not changed.
    """
    return np.asarray(image.resize((width, height), _LANCZOS))


def greyscale(pixels: np.ndarray) -> np.ndarray:
    """Converts uint8 (height, width, 3) to greyscale (ITU-R 601): ``WanAnimatePipeline``'s mask processor.

    Returns uint8 (height, width).
    """
    return np.asarray(Image.fromarray(pixels).convert("L"))


def cropped(image: Image.Image, width: int, height: int, name: str = "the image") -> np.ndarray:
    """Covers a size with an image, and cuts off what is outside: ``VaeImageProcessor``'s resize mode "crop".

    Returns uint8 (height, width, 3). Raises UsageError for an image so narrow that scaling it would fill the
    memory.
    """
    return _centred(image, cropped_size(image.size, width, height, name), width, height)


def cropped_size(size: tuple[int, int], width: int, height: int, name: str) -> tuple[int, int]:
    """Returns width and height to which ``cropped`` scales an image; raises as it does."""
    wide = width / height <= size[0] / size[1]
    scaled = size[0] * height // size[1] if wide else width, height if wide else size[1] * width // size[0]
    if scaled[0] * scaled[1] > _MAX_STRETCHED_PIXELS:
        raise _too_narrow(size, name)
    return scaled


def _centred(image: Image.Image, scaled: tuple[int, int], width: int, height: int) -> np.ndarray:
    """Returns a scaled image in the middle of a black one, uint8 (height, width, 3)."""
    canvas = Image.new("RGB", (width, height))
    left, top = width // 2 - scaled[0] // 2, height // 2 - scaled[1] // 2
    canvas.paste(image.resize(scaled, _LANCZOS), (left, top))
    return np.array(canvas)


def filled(image: Image.Image, width: int, height: int, name: str = "the image") -> np.ndarray:
    """Fits an image into a size, centred on black: ``WanAnimateImageProcessor`` with ``resize_mode="fill"``.

    diffusers asks that processor for bilinear scaling, but the constructor of its base class sets the filter
    back to Lanczos, so the model gets Lanczos. Returns uint8 (height, width, 3). Raises UsageError if the
    image is so narrow that nothing is left of it.
    """
    return _centred(image, filled_size(image.size, width, height, name), width, height)


def filled_size(size: tuple[int, int], width: int, height: int, name: str) -> tuple[int, int]:
    """Returns width and height to which ``filled`` scales an image; raises as it does."""
    wide = width / height < size[0] / size[1]
    scaled = width if wide else size[0] * height // size[1], size[1] * width // size[0] if wide else height
    if 0 in scaled:
        raise _too_narrow(size, name)
    return scaled


def clip_pixels(
    images: Sequence[Image.Image], settings: ImageProcessor, name: str = "the image"
) -> np.ndarray:
    """Makes transparent pixels white, scales the short edge, crops the centre and normalises.

    That is ``CLIPImageProcessor``. Returns float32 (N, crop, crop, 3) of N images of any size. Where the crop
    is larger than the scaled image it is black, before normalisation. Raises UsageError for an image so
    narrow that scaling its short edge would fill the memory.
    """
    mean, std = (np.asarray(colours, np.float32) for colours in (settings.mean, settings.std))
    pixels = np.stack([_centre(image, settings, name) for image in images])
    # As in transformers, only the product is in float64.
    rescaled = (pixels.astype(np.float64) * settings.rescale_factor).astype(np.float32)
    return (rescaled - mean) / std


def _centre(image: Image.Image, settings: ImageProcessor, name: str) -> np.ndarray:
    """uint8 (crop, crop, 3): the centre of an image whose short edge is scaled."""
    size = clip_size(image.size, settings, name)
    pixels = np.asarray(on_white(image, name).resize(size, Image.Resampling(settings.resample)))
    for axis in (0, 1):
        pixels = _crop_or_pad(pixels, settings.crop, axis)
    return pixels


def clip_size(size: tuple[int, int], settings: ImageProcessor, name: str) -> tuple[int, int]:
    """Returns width and height to which ``clip_pixels`` scales an image; raises as it does."""
    edge = settings.shortest_edge
    long_edge = int(edge * max(size) / min(size))
    if edge * long_edge > _MAX_STRETCHED_PIXELS:
        raise _too_narrow(size, name)
    return (edge, long_edge) if size[0] <= size[1] else (long_edge, edge)


def _crop_or_pad(pixels: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Returns the middle of one axis. A shorter axis is padded with zeros, the larger half in front."""
    missing = size - pixels.shape[axis]
    if missing > 0:
        before = math.ceil(missing / 2)
        widths = [(0, 0)] * pixels.ndim
        widths[axis] = (before, missing - before)
        return np.pad(pixels, widths)
    start = -missing // 2
    return np.take(pixels, range(start, start + size), axis)


def reference_canvas(
    image: Image.Image, width: int, height: int, spatial: int = 8, name: str = "the image"
) -> np.ndarray:
    """Fits a reference image into a size, centred on white: ``WanVACEPipeline.preprocess_conditions``.

    As in the reference, the image is scaled twice: with Lanczos to the multiple of ``spatial`` below its own
    size, then to the wanted size (bilinear without antialiasing, on values in [-1, 1]). Returns float32
    (height, width, 3) in [-1, 1]. Raises UsageError if a side has fewer than ``spatial`` pixels, or is so
    narrow that nothing is left of it.
    """
    old_width, old_height = (side - side % spatial for side in image.size)
    new_width, new_height = reference_size(image.size, width, height, spatial, name)
    pixels = resized(image, old_width, old_height).astype(np.float32) / np.float32(255)
    pixels = np.float32(2) * pixels - np.float32(1)
    for axis, size in enumerate((new_height, new_width)):
        pixels = _bilinear(pixels, size, axis)
    canvas = np.ones((height, width, 3), np.float32)
    top, left = (height - new_height) // 2, (width - new_width) // 2
    canvas[top : top + new_height, left : left + new_width] = pixels
    return canvas


def reference_size(
    size: tuple[int, int], width: int, height: int, spatial: int, name: str
) -> tuple[int, int]:
    """Returns width and height to which ``reference_canvas`` scales an image; raises as it does."""
    old_width, old_height = (side - side % spatial for side in size)
    if 0 in (old_width, old_height):
        raise UsageError(
            "out_of_range",
            f"{name} is too small",
            expected=f"{spatial} pixels a side or more",
            found=f"{size[0]}x{size[1]}",
        )
    scale = min(height / old_height, width / old_width)
    scaled = int(old_width * scale), int(old_height * scale)
    if 0 in scaled:
        raise _too_narrow(size, name)
    return scaled


def _bilinear(pixels: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Interpolates one axis as `torch.nn.functional.interpolate(align_corners=False)` does."""
    # Torch computes positions in float32, which moves a weight by up to 1e-4. So does this function.
    old = pixels.shape[axis]
    scale = np.float32(old) / np.float32(size)
    # Rounded once, as the fused multiply-add of torch's kernels does.
    exact = (np.arange(size) + 0.5) * np.float64(scale) - 0.5
    positions = np.maximum(exact.astype(np.float32), np.float32(0))
    lower = positions.astype(np.int64)
    upper = np.minimum(lower + 1, old - 1)
    shape = [1] * pixels.ndim
    shape[axis] = size
    weight = (positions - lower.astype(np.float32)).reshape(shape)
    return np.take(pixels, lower, axis) * (1 - weight) + np.take(pixels, upper, axis) * weight


def _too_narrow(size: tuple[int, int], name: str) -> UsageError:
    return UsageError(
        "out_of_range",
        f"{name} is too narrow",
        expected="sides that differ less",
        found=f"{size[0]}x{size[1]}",
        remedy="crop it",
    )


def scaled_size(
    width: int, height: int, profile_width: int, profile_height: int, multiple: int, spatial: int = 8
) -> tuple[int, int]:
    """Returns the scaled width and height of a video's frames: ``WanVACEPipeline.preprocess_conditions``.

    Frames with more pixels than the profile are scaled to fit into its size; smaller ones are not scaled. The
    result is rounded down to multiples of ``multiple`` pixels. Only a video whose size becomes the profile's
    size conditions the whole result. ``spatial`` are the pixels of a latent cell's side.
    """
    width, height = width - width % spatial, height - height % spatial
    if width * height > profile_width * profile_height:
        scale = min(profile_width / width, profile_height / height)
        width, height = int(width * scale), int(height * scale)
    return width - width % multiple, height - height % multiple
