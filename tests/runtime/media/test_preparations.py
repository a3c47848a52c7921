"""The table of preparations, and a model of none of our variants that is made of them alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.manifests import built_with, plain_manifest, plain_model
from helpers.pictures import picture, pictures
from helpers.refusals import refuses
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.task import Input, Modes, Task, Windows
from wanrun.media.inputs import Inputs, Media
from wanrun.media.preparations import PREPARATIONS, Canvas
from wanrun.media.prepare import load_media
from wanrun.media.processors import cropped, filled, greyscale, reference_canvas, resized

WIDTH, HEIGHT = 64, 48
CANVAS = Canvas(WIDTH, HEIGHT, spatial=8, multiple=16, title="the picture")


@pytest.mark.parametrize("name", PREPARATIONS)
def test_shape_and_dtype_are_as_the_table_says(name: Any) -> None:
    prepared = PREPARATIONS[name]
    found = prepared.process(picture(2 * WIDTH, 2 * HEIGHT), CANVAS)
    assert found.shape == prepared.shape(CANVAS) and found.dtype == prepared.dtype
    assert prepared.empty(3, CANVAS).shape == (3, *found.shape)


def test_what_each_computes() -> None:
    image = picture(90, 70)
    for name, expected in (
        ("resize", resized(image, WIDTH, HEIGHT)),
        ("fit_on_black", filled(image, WIDTH, HEIGHT)),
        ("fit_on_white", reference_canvas(image, WIDTH, HEIGHT)),
        ("greyscale", greyscale(resized(image, WIDTH, HEIGHT))),
    ):
        np.testing.assert_array_equal(PREPARATIONS[name].process(image, CANVAS), expected)  # type: ignore[index]


@pytest.mark.parametrize(("fit", "made"), [("stretch", resized), ("crop", cropped), ("pad", filled)])
def test_what_fit_decides(fit: str, made: Any) -> None:
    image, canvas = picture(90, 40), replace(CANVAS, fit=fit)
    expected = made(image, WIDTH, HEIGHT)
    np.testing.assert_array_equal(PREPARATIONS["resize"].process(image, canvas), expected)
    np.testing.assert_array_equal(PREPARATIONS["greyscale"].process(image, canvas), greyscale(expected))
    black = filled(image, WIDTH, HEIGHT)
    np.testing.assert_array_equal(PREPARATIONS["fit_on_black"].process(image, canvas), black)


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
