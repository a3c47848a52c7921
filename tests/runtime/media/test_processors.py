"""Images as the programs take them, by values that a reader can check; parity holds them to the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.pictures import TRANSPARENT, picture, with_transparent_colour
from helpers.refusals import refuses
from wanrun.artifact.model import ImageProcessor
from wanrun.errors import UsageError
from wanrun.media.images import read_image
from wanrun.media.processors import clip_pixels, filled, greyscale, reference_canvas, resized, scaled_size

RED = (200, 100, 50)
MEAN, STD = (0.5, 0.25, 0.0), (0.5, 0.25, 1.0)


def clip(shortest_edge: int, crop: int) -> ImageProcessor:
    return ImageProcessor(
        shortest_edge=shortest_edge, crop=crop, resample=3, rescale_factor=1 / 255, mean=MEAN, std=STD
    )


def plain(width: int, height: int) -> Image.Image:
    """One colour, which no filter changes."""
    return Image.new("RGB", (width, height), RED)


def where_red(canvas: np.ndarray) -> tuple[slice, slice]:
    """The rectangle of a canvas that has the colour; nothing else may have it."""
    red = (canvas == RED).all(-1)
    rows, columns = np.flatnonzero(red.any(1)), np.flatnonzero(red.any(0))
    found = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    assert red[found].all() and red.sum() == red[found].size
    return found


def test_an_image_of_the_size_is_not_changed() -> None:
    image = picture(40, 24)
    assert np.array_equal(resized(image, 40, 24), np.asarray(image))
    assert np.array_equal(filled(image, 40, 24), np.asarray(image))
    assert np.array_equal(greyscale(resized(image, 40, 24)), np.asarray(image.convert("L")))


def test_resized_whatever_the_aspect_ratio() -> None:
    found = resized(plain(90, 20), 16, 48)
    assert found.shape == (48, 16, 3) and found.dtype == np.uint8
    assert (found == RED).all()


def test_greyscale_is_itu_r_601() -> None:
    found = greyscale(resized(plain(9, 9), 4, 2))
    assert found.shape == (2, 4)
    assert (found == round(0.299 * 200 + 0.587 * 100 + 0.114 * 50)).all()


@pytest.mark.parametrize(
    ("size", "place"),
    [
        ((80, 20), (slice(10, 22), slice(0, 48))),  # 48x12, in the middle of 32 rows
        ((20, 80), (slice(0, 32), slice(20, 28))),  # 8x32
        ((24, 16), (slice(0, 32), slice(0, 48))),
    ],
)
def test_filled_is_centred_on_black(size: tuple[int, int], place: tuple[slice, slice]) -> None:
    canvas = filled(plain(*size), 48, 32)
    assert canvas.shape == (32, 48, 3)
    assert where_red(canvas) == place
    canvas[place] = 0
    assert not canvas.any()


@pytest.mark.parametrize(
    ("size", "place"),
    [
        ((80, 40), (slice(4, 28), slice(0, 48))),  # 48x24
        ((87, 47), (slice(4, 28), slice(0, 48))),  # cut to multiples of 8 first
        ((16, 32), (slice(0, 32), slice(16, 32))),
    ],
)
def test_a_reference_is_centred_on_white(size: tuple[int, int], place: tuple[slice, slice]) -> None:
    canvas = reference_canvas(plain(*size), 48, 32)
    assert canvas.shape == (32, 48, 3) and canvas.dtype == np.float32
    red = np.broadcast_to(np.array(RED) / 127.5 - 1, canvas[place].shape)
    np.testing.assert_allclose(canvas[place], red, atol=1e-6)
    canvas[place] = 1
    assert (canvas == 1).all()


def test_bilinear_scaling_of_a_reference() -> None:
    """Twice as wide: a quarter and three quarters of the neighbours, and the edges as they are."""
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:, 4:] = 255
    canvas = reference_canvas(Image.fromarray(pixels), 16, 16)
    expected = np.repeat([-1.0, -0.5, 0.5, 1.0], [7, 1, 1, 7])
    np.testing.assert_allclose(canvas[5, :, 0], expected, atol=1e-6)


def test_clip_pixels_crop_the_centre() -> None:
    pixels = np.zeros((6, 12, 3), np.uint8)
    pixels[:, 3:9] = RED
    (found,) = clip_pixels([Image.fromarray(pixels)], clip(6, 6))
    expected = (np.array(RED) / 255 - MEAN) / STD
    assert found.shape == (6, 6, 3) and found.dtype == np.float32
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), rtol=1e-6)


def test_clip_pixels_pad_with_black_before_they_are_normalised() -> None:
    (found,) = clip_pixels([plain(10, 4)], clip(4, 7))
    black, red = (
        (np.array([0, 0, 0]) - MEAN) / STD,
        (np.array(RED) / 255 - MEAN) / STD,
    )
    for rows, value in (
        (found[:2], black),
        (found[2:6], red),
        (found[6:], black),
    ):  # the larger half in front
        np.testing.assert_allclose(rows, np.broadcast_to(value, rows.shape), atol=1e-6)


def test_clip_pixels_scale_the_short_edge() -> None:
    images = [picture(40, 20), picture(20, 40)]
    found = clip_pixels(images, clip(10, 10))
    scaled = np.asarray(images[0].resize((20, 10), Image.Resampling.BICUBIC))[:, 5:15] / 255
    np.testing.assert_allclose(found[0], (scaled - MEAN) / STD, atol=1e-6)
    assert found.shape == (2, 10, 10, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRANSPARENT)
def test_a_transparent_colour_is_white_for_clip_alone(kind: str, tmp_path: Path) -> None:
    image = read_image(with_transparent_colour(kind, tmp_path / "picture"), "--image")
    colour = image.getpixel((30, 0) if kind == "turned" else (0, 0))
    shape = (61, 47) if kind == "turned" else (47, 61)
    seen = np.asarray(image)
    hidden = (seen == colour).all(-1)
    assert hidden.shape == shape and hidden.sum() == 20 * 47
    white = Image.fromarray(np.where(hidden[..., None], np.uint8(255), seen))
    np.testing.assert_array_equal(clip_pixels([image], clip(24, 24)), clip_pixels([white], clip(24, 24)))
    assert np.array_equal(resized(image, *image.size), seen)  # the VAE's
    assert np.array_equal(filled(image, *image.size), seen)


def test_a_transparency_that_is_no_colour() -> None:
    image = plain(10, 10)
    image.info["transparency"] = "red"
    with pytest.raises(UsageError, match="--image is damaged"):
        clip_pixels([image], clip(8, 8), "--image")


def test_what_is_too_narrow_or_small_is_refused() -> None:
    narrow = plain(1, 400)
    for call in (
        lambda: filled(narrow, 64, 48, "--image"),
        lambda: reference_canvas(plain(8, 4000), 64, 48, name="--image"),
        lambda: clip_pixels([plain(1, 400_000)], clip(224, 224), "--image"),
    ):
        with refuses("out_of_range", what="--image", remedy="crop"):
            call()
    with refuses("out_of_range", what="--image", expected="8 pixels", found="90x7"):
        reference_canvas(plain(90, 7), 64, 48, name="--image")


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((96, 64), (96, 64)),
        ((200, 130), (96, 48)),  # 200x128 scaled by 0.48, and 61 rows are 48
        ((100, 50), (96, 48)),  # smaller: only cut to multiples
        ((64, 200), (16, 64)),
        ((1920, 1280), (96, 64)),
    ],
)
def test_sizes_that_videos_are_scaled_to(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert scaled_size(*size, 96, 64, 16) == expected
