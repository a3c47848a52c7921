"""Metadata record images and videos by their names and digests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from helpers.media_tasks import FACE, FRAMES, HEIGHT, WIDTH, manifest_of, profile_of
from helpers.pictures import picture, pictures, write_folder
from wanrun.artifact.programs import Profile
from wanrun.media.inputs import Inputs, Media
from wanrun.media.prepare import load_media

A, B = picture(90, 70, 1), picture(50, 80, 2)
MOVING = pictures(FRAMES, WIDTH, HEIGHT)
FACES = pictures(FRAMES, FACE, FACE)


def load(variant: str, media: Media, profile: Profile | None = None) -> Inputs:
    return load_media(manifest_of(variant), profile or profile_of(), media)


def test_files_are_recorded_by_name_and_content(tmp_path: Path) -> None:
    path = tmp_path / "first picture.png"
    A.save(path)
    facts = load("wan2.1-i2v", Media(image=path)).facts
    assert facts == {
        "image": "first picture.png",
        "image_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    assert load("wan2.1-i2v", Media(image=str(path))).facts == facts


@pytest.mark.slow
def test_folders_are_recorded_by_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(MOVING, tmp_path / "frames")

    def digest() -> str:
        return str(load("wan2.1-vace", Media(video=folder)).facts["video_sha256"])

    first = digest()
    (folder / ".hidden").write_text("no matter")
    (folder / "frame3.png").rename(folder / "frame33.png")
    renamed = digest()
    (folder / "frame33.png").rename(folder / "frame3.png")
    assert first == digest() != renamed
    MOVING[5].save(folder / "frame3.png")
    assert digest() not in (first, renamed)
    monkeypatch.chdir(folder)
    assert load("wan2.1-vace", Media(video=".")).facts["video"] == "frames"


def test_pictures_in_memory_are_recorded_by_their_pixels() -> None:
    facts = [load("wan2.1-i2v", Media(image=image)).facts for image in (A, A.copy(), B)]
    assert facts[0] == facts[1] != facts[2] and facts[0]["image"] is None
    videos = [load("wan2.1-vace", Media(video=frames)).facts for frames in (MOVING, MOVING[::-1])]
    assert videos[0] != videos[1]


def test_references_and_mode_are_recorded(tmp_path: Path) -> None:
    A.save(tmp_path / "a.png")
    facts = load("wan2.1-vace", Media(reference_image=(tmp_path / "a.png", B)), profile_of(2)).facts
    assert facts["reference_image"] == ["a.png", None] and len(facts["reference_image_sha256"]) == 2
    assert (
        load("wan2.2-animate", Media(image=A, pose_video=MOVING, face_video=FACES)).facts["mode"] == "animate"
    )
