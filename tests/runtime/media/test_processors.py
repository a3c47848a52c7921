"""Images as programs take them, by values that a reader can check; parity holds them to the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.manifests import built_with, plain_manifest, plain_model
from helpers.pictures import TRANSPARENT, picture, pictures, with_transparent_colour
from helpers.refusals import refuses
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.model import ImageProcessor
from wanrun.artifact.programs import Profile
from wanrun.artifact.task import Input, Modes, Task, Windows
from wanrun.errors import UsageError
from wanrun.media.images import read_image
from wanrun.media.inputs import Inputs, Media
from wanrun.media.preparations import PREPARATIONS, Canvas
from wanrun.media.prepare import load_media
from wanrun.media.processors import (
    clip_pixels,
    cropped,
    filled,
    greyscale,
    reference_canvas,
    resized,
    scaled_size,
)

# --- processors ---


RED = (200, 100, 50)
MEAN, STD = (0.5, 0.25, 0.0), (0.5, 0.25, 1.0)


def clip(shortest_edge: int, crop: int) -> ImageProcessor:
    return ImageProcessor(
        shortest_edge=shortest_edge, crop=crop, resample=3, rescale_factor=1 / 255, mean=MEAN, std=STD
    )


def plain(width: int, height: int) -> Image.Image:
    """One colour, which no filter changes."""
    return Image.new("RGB", (width, height), RED)


def test_an_image_of_the_size_is_not_changed() -> None:
    image = picture(40, 24)
    assert np.array_equal(resized(image, 40, 24), np.asarray(image))
    assert np.array_equal(filled(image, 40, 24), np.asarray(image))
    assert np.array_equal(greyscale(resized(image, 40, 24)), np.asarray(image.convert("L")))


def test_one_colour_stays_so_whatever_the_aspect_ratio() -> None:
    found = resized(plain(90, 20), 16, 48)
    assert found.shape == (48, 16, 3) and found.dtype == np.uint8
    assert (found == RED).all()
    grey = greyscale(found)  # ITU-R 601
    assert grey.shape == (48, 16)
    assert (grey == round(0.299 * 200 + 0.587 * 100 + 0.114 * 50)).all()


@pytest.mark.parametrize(
    ("made", "size", "place"),
    [
        (filled, (80, 20), (slice(10, 22), slice(0, 48))),  # 48x12, in the middle of 32 rows
        (filled, (20, 80), (slice(0, 32), slice(20, 28))),  # 8x32
        (filled, (24, 16), (slice(0, 32), slice(0, 48))),
        (reference_canvas, (80, 40), (slice(4, 28), slice(0, 48))),  # 48x24
        (reference_canvas, (87, 47), (slice(4, 28), slice(0, 48))),  # cut to multiples of 8 first
        (reference_canvas, (16, 32), (slice(0, 32), slice(16, 32))),
    ],
)
def test_what_fits_is_centred_on_black_or_white(
    made: Any, size: tuple[int, int], place: tuple[slice, slice]
) -> None:
    canvas = made(plain(*size), 48, 32)
    dtype, colour, background = {
        filled: (np.uint8, np.array(RED), 0),
        reference_canvas: (np.float32, np.array(RED) / 127.5 - 1, 1),
    }[made]
    assert canvas.shape == (32, 48, 3) and canvas.dtype == dtype
    np.testing.assert_allclose(canvas[place], np.broadcast_to(colour, canvas[place].shape), atol=1e-6)
    canvas[place] = background
    assert (canvas == background).all()


def test_bilinear_scaling_of_a_reference() -> None:
    """Twice as wide: a quarter and three quarters of the neighbours, and the edges as they are."""
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:, 4:] = 255
    canvas = reference_canvas(Image.fromarray(pixels), 16, 16)
    expected = np.repeat([-1.0, -0.5, 0.5, 1.0], [7, 1, 1, 7])
    np.testing.assert_allclose(canvas[5, :, 0], expected, atol=1e-6)


def test_a_reference_is_first_scaled_to_multiples_of_eight() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (23, 17, 3), np.uint8))
    smaller = Image.fromarray(resized(image, 16, 16))
    np.testing.assert_array_equal(reference_canvas(image, 48, 32), reference_canvas(smaller, 48, 32))


def test_clip_pixels_crop_the_centre() -> None:
    pixels = np.zeros((6, 12, 3), np.uint8)
    pixels[:, 3:9] = RED
    (found,) = clip_pixels([Image.fromarray(pixels)], clip(6, 6))
    assert found.shape == (6, 6, 3) and found.dtype == np.float32
    np.testing.assert_allclose(found, np.full(found.shape, (np.array(RED) / 255 - MEAN) / STD), rtol=1e-6)


def test_clip_pixels_pad_with_black_before_they_are_normalised() -> None:
    (found,) = clip_pixels([plain(10, 4)], clip(4, 7))
    expected = np.zeros((7, 7, 3))
    expected[2:6] = RED  # the larger half of the padding is in front
    np.testing.assert_allclose(found, (expected / 255 - MEAN) / STD, atol=1e-6)


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


# --- preparations ---


WIDTH, HEIGHT = 64, 48
CANVAS = Canvas(WIDTH, HEIGHT, spatial=8, multiple=16, title="the picture")


@pytest.mark.parametrize("name", PREPARATIONS)
def test_shape_and_dtype_are_as_the_table_says(name: Any) -> None:
    prepared = PREPARATIONS[name]
    found = prepared.process(picture(2 * WIDTH, 2 * HEIGHT), CANVAS)
    assert found.shape == prepared.shape(CANVAS) and found.dtype == prepared.dtype
    assert prepared.empty(3, CANVAS).shape == (3, *found.shape)


@pytest.mark.parametrize(("fit", "made"), [("stretch", resized), ("crop", cropped), ("pad", filled)])
def test_what_each_computes_by_the_fit(fit: str, made: Any) -> None:
    image, canvas = picture(90, 40), replace(CANVAS, fit=fit)
    expected = made(image, WIDTH, HEIGHT)
    for name, values in (
        ("resize", expected),
        ("greyscale", greyscale(expected)),
        ("fit_on_black", filled(image, WIDTH, HEIGHT)),
        ("fit_on_white", reference_canvas(image, WIDTH, HEIGHT)),
    ):
        np.testing.assert_array_equal(PREPARATIONS[name].process(image, canvas), values)  # type: ignore[index]


def test_a_squeeze_that_is_seen() -> None:
    """4:3 and wider ones are; 3:2 is not, at 832x480."""
    canvas = Canvas(832, 480, spatial=8, multiple=16, title="the picture")
    sizes = ((1500, 1000), (1600, 900), (1600, 1200), (4000, 800), (480, 832))
    assert [canvas.squeezes(*size) for size in sizes] == [False, False, True, True, True]
    assert not replace(canvas, fit="crop").squeezes(4000, 800)


def test_the_aspect_ratio_is_kept_or_refused() -> None:
    process = PREPARATIONS["resize_same_aspect"].process
    large = picture(2 * WIDTH, 2 * HEIGHT)
    np.testing.assert_array_equal(process(large, CANVAS), resized(large, WIDTH, HEIGHT))
    with refuses("mismatch", what="the picture", expected=f"{WIDTH}x{HEIGHT}", found="200x100"):
        process(picture(200, 100), CANVAS)


def load(task: Task, media: Media, num_references: int = 0, num_frames: int = 5) -> Inputs:
    manifest: Manifest = plain_manifest(model=plain_model(task=task))
    profile = Profile(WIDTH, HEIGHT, num_frames, 1, True, 0, built_with(), num_references)
    return load_media(manifest, profile, media)


def test_a_model_that_no_variant_is() -> None:
    """Other inputs under other names, in modes of their own: the record alone says it."""
    task = Task(
        name="new",
        inputs={
            "image": Input(kind="image", array="style", prepare="greyscale", size=24, default=7),
            "last_image": Input(kind="image", array="end", prepare="fit_on_white", flag="has_end"),
            "mask": Input(kind="video", array="depth", prepare="greyscale", mode="deep", required=True),
            "reference_image": Input(kind="images", array="subjects", prepare="fit_on_black"),
        },
        modes=Modes(names=("flat", "deep"), array="how"),
    )
    plain = load(task, Media()).arrays
    assert plain.keys() == {"style", "how"} and plain["how"] == 0
    assert plain["style"].shape == (1, 24, 24) and (plain["style"] == 7).all()
    media = Media(
        image=picture(90, 70),
        last_image=picture(30, 90),
        mask=pictures(5, 40, 30),
        reference_image=(picture(50, 50), picture(60, 20)),
        mode="deep",
    )
    loaded = load(task, media, num_references=2)
    arrays = loaded.arrays
    assert {name: (array.shape, array.dtype.name) for name, array in arrays.items()} == {
        "style": ((1, 24, 24), "uint8"),
        "end": ((1, HEIGHT, WIDTH, 3), "float32"),
        "has_end": ((), "int32"),
        "depth": ((5, HEIGHT, WIDTH), "uint8"),
        "subjects": ((2, HEIGHT, WIDTH, 3), "uint8"),
        "how": ((), "int32"),
    }
    assert arrays["how"] == arrays["has_end"] == 1
    assert loaded.facts["mode"] == "deep" and len(loaded.facts["reference_image_sha256"]) == 2
    with refuses("missing_parameter", what="deep") as caught:
        load(task, Media(mode="deep"))
    assert caught.value.fields == ("mask", "mode")


def test_windows_of_another_video() -> None:
    """Any video may decide how long the others are, and a window may share any number of frames."""
    task = Task(
        name="new",
        inputs={
            "mask": Input(kind="video", array="depth", prepare="greyscale", default=9),
            "video": Input(kind="video", array="motion", required=True),
        },
        windows=Windows(frames_of="video", overlaps=(2, 3), carried={"before": "end"}),
    )
    loaded = load(task, Media(video=pictures(9, 40, 30)), num_frames=7)
    assert (loaded.num_frames, loaded.segment_overlap) == (9, 2)
    assert loaded.arrays["motion"].shape == (12, HEIGHT, WIDTH, 3)
    assert loaded.arrays["depth"].shape == (12, HEIGHT, WIDTH) and (loaded.arrays["depth"] == 9).all()
    media = Media(video=pictures(9, 40, 30), mask=pictures(4, 40, 30), segment_overlap=3)
    loaded = load(task, media, num_frames=7)
    assert loaded.arrays["motion"].shape[:1] == loaded.arrays["depth"].shape[:1] == (11,)
    with refuses("out_of_range", what="segment_overlap", expected="2 or 3", found=1):
        load(task, Media(video=pictures(9, 40, 30), segment_overlap=1))
