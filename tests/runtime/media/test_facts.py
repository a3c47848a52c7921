"""What metadata record of images and videos: digests of what was decoded, also where files change."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from helpers.media_files import FRAMES, HEIGHT, WIDTH, manifest_of, profile_of
from helpers.pictures import picture, pictures, same, write_folder, write_video
from helpers.refusals import check_refusal, refuses
from wanrun.artifact.programs import Profile
from wanrun.errors import UsageError, WanError
from wanrun.files import file_sha256
from wanrun.media import decoder, preparations
from wanrun.media import prepare as wanrun_inputs
from wanrun.media.facts import media_facts
from wanrun.media.inputs import Inputs, Media
from wanrun.media.prepare import load_media
from wanrun.media.processors import resized

# --- facts ---


A, B = picture(90, 70, 1), picture(50, 80, 2)
MOVING = pictures(FRAMES, WIDTH, HEIGHT)
FACES = pictures(17, 25, 31, 5)
ANIMATE = Media(image=A, pose_video=pictures(14, 70, 60, 3), face_video=FACES)


def load(variant: str, media: Media, profile: Profile | None = None) -> Inputs:
    return load_media(manifest_of(variant), profile or profile_of(), media)


def test_files_are_recorded_by_name_and_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content that was decoded, whatever is in the file afterwards."""
    path = tmp_path / "first picture.png"
    A.save(path)
    facts = {"image": path.name, "image_sha256": file_sha256(path)}
    assert load("wan2.1-i2v", Media(image=path)).facts == facts
    assert load("wan2.1-i2v", Media(image=str(path))).facts == facts

    def process(image: Image.Image, width: int, height: int) -> np.ndarray:
        assert same(image, A)
        B.save(path)
        return resized(image, width, height)

    monkeypatch.setattr(preparations, "resized", process)
    assert load("wan2.2-ti2v", Media(image=path)).facts == facts


@pytest.mark.slow
def test_folders_are_recorded_by_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the frames that are used, whatever lies behind them."""
    folder = write_folder(FACES, tmp_path / "frames")

    def facts() -> Any:
        return load("wan2.2-animate", replace(ANIMATE, face_video=folder)).facts

    first = facts()
    (folder / ".hidden").write_text("no matter")
    (folder / "frame17.png").mkdir()
    os.mkfifo(folder / "frame18.png")
    assert facts() == first and first["face_video"] == "frames"
    (folder / "frame3.png").rename(folder / "frame03.png")
    renamed = facts()
    (folder / "frame03.png").rename(folder / "frame3.png")
    A.resize((25, 31)).save(folder / "frame16.png")
    assert len({one["face_video_sha256"] for one in (first, renamed, facts())}) == 3
    monkeypatch.chdir(write_folder(MOVING, tmp_path / "moving"))
    assert load("wan2.1-vace", Media(video=".")).facts["video"] == "moving"


def test_pictures_in_memory_are_recorded_by_their_pixels() -> None:
    """As they are used: turned, and without what RGB does not hold."""
    clear = A.convert("RGBA")
    clear.putalpha(0)
    turned = A.transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[0x0112] = 6
    first, *alike, other = (
        load("wan2.1-i2v", Media(image=image)).facts for image in (A, A.copy(), clear, turned, B)
    )
    assert all(facts == first for facts in alike) and first != other and first["image"] is None
    videos = [load("wan2.1-vace", Media(video=frames)).facts for frames in (MOVING, MOVING[::-1])]
    assert videos[0] != videos[1]


def test_references_and_mode_are_recorded(tmp_path: Path) -> None:
    A.save(tmp_path / "a.png")
    facts = load("wan2.1-vace", Media(reference_image=(tmp_path / "a.png", B)), profile_of(2)).facts
    assert facts["reference_image"] == ["a.png", None] and len(facts["reference_image_sha256"]) == 2
    assert load("wan2.2-animate", ANIMATE).facts["mode"] == "animate"


# --- changing ---


def refused(variant: str, media: Media, profile: Profile | None = None) -> WanError:
    with pytest.raises(UsageError) as caught:
        load_media(manifest_of(variant), profile or profile_of(), media)
    assert "\n" not in str(caught.value)
    return caught.value


def test_an_image_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, others = write_folder(MOVING, tmp_path / "frames"), itertools.cycle((A, B))

    decode = decoder.first_frame

    def change(*arguments: Any) -> Image.Image:
        image = decode(*arguments)
        next(others).save(folder / "frame4.png")  # of another size: the clock may not have moved
        return image

    monkeypatch.setattr(decoder, "first_frame", change)
    for variant, media in (
        ("wan2.1-vace", Media(video=folder)),
        ("wan2.2-ti2v", Media(image=folder / "frame4.png")),
    ):
        wrong = refused(variant, media)
        check_refusal(wrong, "changed", what=folder / "frame4.png", remedy="run it again")
        assert wrong.fields == (("video",) if media.video else ("image",))


@pytest.mark.slow
@pytest.mark.parametrize("change", [os.utime, os.remove])
@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_a_video_that_changes_while_it_is_read_is_refused(
    suffix: str, change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_video(MOVING, tmp_path / f"video.{suffix}")
    load("wan2.1-vace", Media(video=path))

    def process(image: Image.Image, width: int, height: int) -> np.ndarray:
        if path.exists():
            change(path)
        return resized(image, width, height)

    monkeypatch.setattr(preparations, "resized", process)
    wrong = refused("wan2.1-vace", Media(video=path))
    check_refusal(wrong, "changed" if change is os.utime else "unreadable", what=path)


@pytest.mark.slow
def test_the_same_is_recorded_without_decoding(tmp_path: Path) -> None:
    A.save(tmp_path / "a.png")
    B.save(tmp_path / "b.png")
    folder, film = write_folder(MOVING, tmp_path / "frames"), write_video(MOVING, tmp_path / "film.mp4")
    media = Media(video=folder, mask=film, reference_image=(tmp_path / "a.png", str(tmp_path / "b.png")))
    manifest, profile = manifest_of("wan2.1-vace"), profile_of(2)
    facts = load_media(manifest, profile, media).facts
    assert len(facts) == 6 and media_facts(manifest, profile, media) == facts
    media = Media(image=tmp_path / "a.png", last_image=tmp_path / "b.png")
    assert media_facts(manifest_of("wan2.2-i2v"), profile, media) == load("wan2.2-i2v", media).facts
    assert media_facts(manifest_of("wan2.2-i2v"), profile, Media(image=A)) is None
    assert media_facts(manifest_of("wan2.2-animate"), profile, ANIMATE) is None
    with refuses("missing_file", what=tmp_path / "c.png"):
        media_facts(manifest_of("wan2.2-i2v"), profile, Media(image=tmp_path / "c.png"))


def test_a_video_is_in_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wanrun_inputs, "_STEP_BYTES", 2**16)
    media = replace(
        ANIMATE,
        pose_video=pictures(120, WIDTH, HEIGHT),
        face_video=pictures(120, 25, 31),
        mode="replace",
        background_video=pictures(120, WIDTH, HEIGHT),
        mask_video=pictures(2, WIDTH, HEIGHT),
    )
    load("wan2.2-animate", media)  # what it imports is not counted
    tracemalloc.start()
    try:
        arrays = load("wan2.2-animate", media).arrays
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    held = sum(array.nbytes for array in arrays.values())
    # A step, and less than a frame's size of what else there is; the smaller video twice would be 10 % more.
    assert held < peak < 1.08 * held
