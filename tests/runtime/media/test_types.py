"""Which media a task takes: what is missing, not taken or contradicts itself is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from helpers.media_tasks import FRAMES, HEIGHT, INPUTS, WIDTH, manifest_of
from helpers.pictures import picture, pictures
from helpers.refusals import refuses
from wanrun.errors import UsageError
from wanrun.media.inputs import Media, check_media

A = picture(90, 70, 1)
MOVING = pictures(FRAMES, WIDTH, HEIGHT)


def check(variant: str, media: Media) -> None:
    check_media(manifest_of(variant), media)


@pytest.mark.parametrize("variant", INPUTS)
def test_what_is_required_is_enough(variant: str) -> None:
    required = {name: A for name, item in INPUTS[variant].items() if item.required and item.mode is None}
    check(variant, Media(**required))  # type: ignore[arg-type]
    for name in required:
        without = {other: value for other, value in required.items() if other != name}
        with refuses("missing_parameter", what=variant) as caught:
            check(variant, Media(**without))  # type: ignore[arg-type]
        assert caught.value.fields == (name,)


@pytest.mark.parametrize("variant", INPUTS)
def test_what_is_not_taken_is_refused(variant: str) -> None:
    everything = {name for inputs in INPUTS.values() for name in inputs}
    required = {name: A for name, item in INPUTS[variant].items() if item.required and item.mode is None}
    others: dict[str, Any] = dict.fromkeys(everything - INPUTS[variant].keys(), A)
    if variant != "wan2.2-animate":
        others |= {"mode": "replace", "segment_overlap": 5}
    for name, value in others.items():
        given = (A,) if name == "reference_image" else value
        with refuses("unsupported", what=variant) as caught:
            check(variant, Media(**required, **{name: given}))  # type: ignore[arg-type]
        assert caught.value.fields[0] == name


def test_a_fit_without_an_effect_is_refused() -> None:
    check("wan2.1-i2v", Media(image=A, fit="crop"))
    with refuses("unsupported", what="fit"):
        check("wan2.1-vace", Media(video=MOVING, fit="crop"))
    with refuses("no_effect", what="fit"):
        check("wan2.2-ti2v", Media(fit="pad"))
    with refuses("missing_parameter") as caught:
        check("wan2.1-i2v", Media(fit="pad"))
    assert caught.value.fields == ("image",)
    with refuses("invalid_value", what="fit", found="zoom"):
        check("wan2.1-i2v", Media(image=A, fit="zoom"))


def test_a_video_begins_with_an_image_or_a_video() -> None:
    for variant in ("anyflow-far-wan2.1", "helios-wan2.1"):
        check(variant, Media(video=MOVING))
        with refuses("conflict") as caught:
            check(variant, Media(image=A, video=MOVING))
        assert set(caught.value.fields) == {"image", "video"}


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        check("wan2.1-flf2v", Media(video="v.mp4", mode="animate"))
    assert set(caught.value.fields) == {"image", "last_image", "video", "mode"}


def test_a_mask_needs_a_video() -> None:
    with refuses("no_effect", what="mask", remedy="video"):
        check("wan2.1-vace", Media(mask=MOVING))
    check("wan2.1-vace", Media(mask=MOVING, video=MOVING))


def test_replace_needs_background_and_mask() -> None:
    animate = Media(image=A, pose_video=MOVING, face_video=MOVING)
    both = replace(animate, background_video=MOVING, mask_video=MOVING)
    check("wan2.2-animate", replace(both, mode="replace"))
    check("wan2.2-animate", replace(animate, mode="animate"))
    with refuses("missing_parameter", what="replace") as caught:
        check("wan2.2-animate", replace(both, mask_video=None, mode="replace"))
    assert caught.value.fields == ("mask_video", "mode")
    for mode in (None, "animate"):
        for name in ("background_video", "mask_video"):
            with refuses("no_effect", what=name, remedy="replace"):
                check("wan2.2-animate", replace(animate, mode=mode, **{name: MOVING}))
    with refuses("invalid_value", what="mode", found="turn"):
        check("wan2.2-animate", replace(animate, mode="turn"))
    with refuses("out_of_range", what="segment_overlap", expected="1 or 5", found=3):
        check("wan2.2-animate", replace(animate, segment_overlap=3))
