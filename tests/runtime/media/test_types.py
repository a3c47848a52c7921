"""Which media a task takes: what is missing, not taken or contradicts itself is refused by name."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from helpers.damage import flag
from helpers.media_tasks import FRAMES, HEIGHT, INPUTS, WIDTH, manifest_of
from helpers.pictures import picture, pictures
from wanrun.errors import UsageError
from wanrun.media.types import Media, check_media

A = picture(90, 70, 1)
MOVING = pictures(FRAMES, WIDTH, HEIGHT)


def check(variant: str, media: Media) -> str:
    """What is wrong with media, as the command line spells it; empty where nothing is."""
    try:
        check_media(manifest_of(variant), media)
    except UsageError as error:
        return error.spelled(flag)
    return ""


@pytest.mark.parametrize("variant", INPUTS)
def test_what_is_required_is_enough(variant: str) -> None:
    required = {name: A for name, item in INPUTS[variant].items() if item.required and item.mode is None}
    assert check(variant, Media(**required)) == ""  # type: ignore[arg-type]
    for name in required:
        without = {other: value for other, value in required.items() if other != name}
        found = check(variant, Media(**without))  # type: ignore[arg-type]
        assert found.startswith(f"--{name.replace('_', '-')} is missing: {variant} needs it")


@pytest.mark.parametrize("variant", INPUTS)
def test_what_is_not_taken_is_refused(variant: str) -> None:
    everything = {name for inputs in INPUTS.values() for name in inputs}
    for name in everything - INPUTS[variant].keys():
        value = (A,) if name == "reference_image" else A
        found = check(variant, Media(**{name: value}))  # type: ignore[arg-type]
        assert f"--{name.replace('_', '-')} cannot be used with {variant}" in found
    if variant != "wan2.2-animate":
        assert "--mode cannot be used" in check(variant, Media(mode="replace"))
        assert "--segment-overlap cannot be used" in check(variant, Media(segment_overlap=5))


def test_a_fit_without_an_effect_is_refused() -> None:
    assert check("wan2.1-i2v", Media(image=A, fit="crop")) == ""
    assert check("wan2.1-vace", Media(video=MOVING, fit="crop")).startswith("--fit cannot be used")
    assert check("wan2.2-ti2v", Media(fit="pad")).startswith("--fit has no effect")
    assert "--fit" not in check("wan2.1-i2v", Media(fit="pad"))  # its image is missing
    assert check("wan2.1-i2v", Media(image=A, fit="zoom")).startswith("--fit is unknown")


def test_a_video_begins_with_an_image_or_a_video() -> None:
    for variant in ("anyflow-far-wan2.1", "helios-wan2.1"):
        assert check(variant, Media(video=MOVING)) == ""
        assert "exclude each other" in check(variant, Media(image=A, video=MOVING))


def test_all_problems_are_said_at_once() -> None:
    found = check("wan2.1-flf2v", Media(video="v.mp4", mode="animate"))
    for option in ("--image is missing", "--last-image is missing", "--video cannot", "--mode cannot"):
        assert option in found


def test_a_mask_needs_a_video() -> None:
    assert "--mask has no effect without --video" in check("wan2.1-vace", Media(mask=MOVING))
    assert check("wan2.1-vace", Media(mask=MOVING, video=MOVING)) == ""


def test_replace_needs_background_and_mask() -> None:
    animate = Media(image=A, pose_video=MOVING, face_video=MOVING)
    both = replace(animate, background_video=MOVING, mask_video=MOVING)
    assert check("wan2.2-animate", replace(both, mode="replace")) == ""
    assert check("wan2.2-animate", replace(animate, mode="animate")) == ""
    found = check("wan2.2-animate", replace(both, mask_video=None, mode="replace"))
    assert found.startswith("--mask-video is missing") and "with --mode replace" in found
    for mode in (None, "animate"):
        found = check("wan2.2-animate", replace(both, mode=mode))
        assert "--background-video only has an effect with --mode replace" in found
        assert "--mask-video only has an effect with" in found
    assert "found turn" in check("wan2.2-animate", replace(animate, mode="turn"))
    assert "expected 1 or 5; found 3" in check("wan2.2-animate", replace(animate, segment_overlap=3))
