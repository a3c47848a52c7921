"""Which media a task takes, and what is seen of a file without decoding it: refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from PIL import Image

from helpers.media_files import FRAMES, HEIGHT, INPUTS, WIDTH, manifest_of, profile_of
from helpers.pictures import picture, pictures, write_video
from helpers.refusals import check_refusal, refuses
from wanrun.artifact.programs import Profile
from wanrun.errors import UsageError, WanError
from wanrun.media.images import probe_image, read_image
from wanrun.media.inputs import Media, check_media
from wanrun.media.prepare import load_media, probe_media

# --- types ---


A = picture(90, 70, 1)
MOVING = pictures(FRAMES, WIDTH, HEIGHT)


def check(variant: str, media: Media) -> None:
    check_media(manifest_of(variant), media)


@pytest.mark.parametrize("variant", INPUTS)
def test_what_is_required_is_enough_and_others_are_refused(variant: str) -> None:
    inputs = INPUTS[variant]
    required: dict[str, Any] = {
        name: A for name, item in inputs.items() if item.required and item.mode is None
    }
    check(variant, Media(**required))
    for name in required:
        with refuses("missing_parameter", what=variant) as caught:
            check(variant, Media(**{**required, name: None}))
        assert caught.value.fields == (name,)
    everything = {name for inputs in INPUTS.values() for name in inputs}
    others: dict[str, Any] = dict.fromkeys(everything - inputs.keys(), A)
    if variant != "wan2.2-animate":
        others |= {"mode": "replace", "segment_overlap": 5}
    for name, value in others.items():
        given: dict[str, Any] = {name: (A,) if name == "reference_image" else value}
        with refuses("unsupported", what=variant) as caught:
            check(variant, Media(**required, **given))
        assert caught.value.fields[0] == name


ANIMATE = Media(image=A, pose_video=MOVING, face_video=MOVING)
REPLACE = replace(ANIMATE, background_video=MOVING, mask_video=MOVING, mode="replace")


@pytest.mark.parametrize(
    ("variant", "media"),
    [
        ("wan2.1-i2v", Media(image=A, fit="crop")),
        ("anyflow-far-wan2.1", Media(video=MOVING)),
        ("helios-wan2.1", Media(video=MOVING)),
        ("wan2.1-vace", Media(mask=MOVING, video=MOVING)),
        ("wan2.2-animate", REPLACE),
        ("wan2.2-animate", replace(ANIMATE, mode="animate")),
    ],
)
def test_what_goes_together(variant: str, media: Media) -> None:
    check(variant, media)


@pytest.mark.parametrize(
    ("variant", "media", "code", "fields", "parts"),
    [
        ("wan2.1-vace", Media(video=MOVING, fit="crop"), "unsupported", "fit", {}),
        ("wan2.2-ti2v", Media(fit="pad"), "no_effect", "fit", {}),
        ("wan2.1-i2v", Media(fit="pad"), "missing_parameter", "image", {}),
        ("wan2.1-i2v", Media(image=A, fit="zoom"), "invalid_value", "fit", {"found": "zoom"}),
        ("anyflow-far-wan2.1", Media(image=A, video=MOVING), "conflict", "image video", {}),
        ("helios-wan2.1", Media(image=A, video=MOVING), "conflict", "image video", {}),
        ("wan2.1-vace", Media(mask=MOVING), "no_effect", "mask video", {}),
        ("wan2.2-animate", replace(REPLACE, mask_video=None), "missing_parameter", "mask_video mode", {}),
        *(
            ("wan2.2-animate", replace(ANIMATE, mode=mode, **{name: MOVING}), "no_effect", f"{name} mode", {})
            for mode in (None, "animate")
            for name in ("background_video", "mask_video")
        ),
        ("wan2.2-animate", replace(ANIMATE, mode="turn"), "invalid_value", "mode", {"found": "turn"}),
        (
            "wan2.2-animate",
            replace(ANIMATE, segment_overlap=3),
            "out_of_range",
            "segment_overlap",
            {"expected": "1 or 5", "found": 3},
        ),
        # All that is wrong at once.
        ("wan2.1-flf2v", Media(video="v.mp4", mode="animate"), None, "image last_image video mode", {}),
    ],
)
def test_what_contradicts_itself(
    variant: str, media: Media, code: Any, fields: str, parts: dict[str, object]
) -> None:
    with pytest.raises(UsageError) as caught:
        check(variant, media)
    check_refusal(caught.value, code or caught.value.code, **parts)
    assert set(caught.value.fields) == set(fields.split())


# --- probe ---


A, B = picture(90, 70, 1), picture(50, 80, 2)


def refused(variant: str, media: Media, profile: Profile | None = None) -> WanError:
    with pytest.raises(UsageError) as caught:
        load_media(manifest_of(variant), profile or profile_of(), media)
    assert "\n" not in str(caught.value)
    return caught.value


def _cut(file: Path, share: float = 0.5) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])


def _write(kind: str, file: Path) -> None:
    """Writes a file that cannot be used."""
    noise = picture(1300, 900, 3)
    match kind:
        case "text":
            file.write_text("no picture")
        case "cut PNG" | "cut JPEG":
            noise.save(file, kind.split()[1])
            _cut(file)
        case "header alone":
            file.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0")
        case "bomb":
            Image.new("1", (9000, 9000)).save(file, "PNG")
        case "deep":
            Image.new("I;16", (64, 48)).save(file, "PNG")
        case "narrow":
            Image.new("RGB", (1, 100_000)).save(file, "PNG")
        case "cut mp4":  # its index is at its end
            write_video(MOVING, file)
            _cut(file, 0.9)
        case "long mp4":
            write_video([*MOVING, *MOVING], file)
        case "other aspect":
            write_video(pictures(FRAMES, 2 * WIDTH, HEIGHT), file)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "name", "early"),
    [
        *((kind, "image", True) for kind in ("text", "header alone", "bomb", "deep", "narrow")),
        *((kind, "image", False) for kind in ("cut PNG", "cut JPEG")),
        *((kind, "video", True) for kind in ("text", "cut mp4", "other aspect", "cut PNG")),
        ("long mp4", "video", False),
    ],
)
def test_what_a_probe_sees(
    kind: str, name: str, early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it refuses, reading refuses with the same line; damage after headers it does not see."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5_000_000)
    variant, suffix = ("wan2.1-i2v", "png") if name == "image" else ("wan2.1-vace", "mp4")
    file = tmp_path / f"{name}.{suffix}"
    _write(kind, file)
    media = Media(**{name: file})  # type: ignore[arg-type]
    said = refused(variant, media)
    if not early:
        probe_media(manifest_of(variant), profile_of(), media)
        return
    with pytest.raises(UsageError) as caught:
        probe_media(manifest_of(variant), profile_of(), media)
    assert caught.value.parts == said.parts


@pytest.mark.slow
def test_a_probe_takes_what_can_be_used(tmp_path: Path) -> None:
    """Also one pixel, an image that lies on its side, and images in memory; as many as are built for."""
    tiny, turned, moving = tmp_path / "tiny.png", tmp_path / "turned.jpg", tmp_path / "moving.mp4"
    Image.new("RGB", (1, 1)).save(tiny)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(HEIGHT, WIDTH, 3).save(turned, exif=exif)
    write_video(MOVING, moving)
    probe_media(manifest_of("wan2.1-i2v"), profile_of(), Media(image=tiny))
    assert probe_image(turned, "--image") == read_image(turned, "--image").size == (WIDTH, HEIGHT)
    vace = manifest_of("wan2.1-vace")
    probe_media(vace, profile_of(), Media(video=moving, mask=MOVING))
    probe_media(vace, profile_of(2), Media(reference_image=(A, turned)))
    with pytest.raises(UsageError):
        probe_media(vace, profile_of(2), Media(reference_image=(A,)))
