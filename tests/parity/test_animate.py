"""Animate against diffusers' WanAnimatePipeline, in both modes and over several segments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.pictures import picture, pictures, write_folder
from helpers.whole_path import Case, WholePath
from wanrun.replay.samples import sample_mask

# diffusers hands arrays to NumPy in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

FRAMES = {
    "replace": 30,
    "overlap of five": 19,
    "one segment": 13,
    "lcm": 23,
    "without guidance": 16,
}
"""Of the pose video, and so of the result; segments have 13, of which they share one or five."""

Make = Callable[[bool], WholePath]


@pytest.fixture(scope="module")
def path(
    media_toy: Callable[[str], tuple[Path, Path]], commands: Any, tmp_path_factory: pytest.TempPathFactory
) -> Make:
    folder = tmp_path_factory.mktemp("animate")
    picture(131, 75, 1).save(folder / "image.png")
    cases = {}
    for seed, (name, frames) in enumerate(FRAMES.items()):
        own = folder / name
        media = {
            "image": folder / "image.png",
            "pose_video": write_folder(pictures(frames, 96, 64, seed), own / "pose"),
            # Shorter than the pose: it goes on backwards.
            "face_video": write_folder(pictures(frames - 4, 21, 25, seed + 10), own / "face"),
        }
        options: dict[str, Any] = {"mode": "replace"} if name == "replace" else {}
        if options:
            media["background_video"] = write_folder(pictures(frames + 2, 100, 70, seed + 20), own / "back")
            media["mask_video"] = write_folder(sample_mask(96, 64, frames), own / "mask")
        if name == "overlap of five":
            options = {"segment_overlap": 5}
        if name == "lcm":
            options = {"solver": "lcm"}
        cases[name] = Case(3, media, seed, options)
    made: dict[bool, WholePath] = {}

    def make(guidance: bool) -> WholePath:
        if guidance not in made:
            chosen = {key: case for key, case in cases.items() if (key != "without guidance") == guidance}
            made[guidance] = WholePath(
                media_toy("wan2.2-animate"),
                commands,
                tmp_path_factory.mktemp("made"),
                chosen,
                (96, 64, 13),
                3.0 if guidance else 1.0,
            )
        return made[guidance]

    return make


@pytest.mark.parametrize("name", FRAMES)
def test_latents_and_frames(path: Make, name: str, record_property: Any) -> None:
    made = path(name != "without guidance")
    made.check(name, record_property)  # with lcm every window goes on with the noise of the one before
    latents, frames = made.ours(name, "step")
    assert latents.shape[2] == 4 and len(frames) == FRAMES[name]


def test_both_loops_are_the_same(path: Make) -> None:
    """Of two segments. What the other cases change, what is encoded and the noise, comes before the loop."""
    path(False).check_loops("without guidance")
