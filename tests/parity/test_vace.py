"""VACE against diffusers' WanVACEPipeline: a video with a mask that is partly on, and reference images."""

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

NAMES = ("masked video", "no mask", "references alone", "scaled")
SCALED = {"conditioning_scale": 0.3}
PLAIN = ("masked, no reference", "text alone")

Make = Callable[[str], WholePath]


@pytest.fixture(scope="module")
def path(
    media_toy: Callable[[str], tuple[Path, Path]], commands: Any, tmp_path_factory: pytest.TempPathFactory
) -> Make:
    """Makes a case by its name; those without reference images are of another profile."""
    folder = tmp_path_factory.mktemp("vace")
    # Larger than the profile, of its aspect: it is scaled down.
    video = write_folder(pictures(9, 144, 96, 1), folder / "video")
    mask = write_folder(sample_mask(144, 96, 9), folder / "mask")
    files = folder / "one.png", folder / "two.png"
    picture(131, 75, 1).save(files[0])
    picture(53, 87, 2).save(files[1])
    media = {"video": video, "mask": mask, "reference_image": files}
    cases = {
        "masked video": Case(4, media, 1),
        "no mask": Case(3, {"video": video, "reference_image": files}, 2),
        "references alone": Case(3, {"reference_image": files}, 3),
        "scaled": Case(3, media, 1, SCALED),
    }
    plain = {
        "masked, no reference": Case(3, {"video": video, "mask": mask}, 4),
        "text alone": Case(3, {}, 5),
    }
    assert tuple(cases) == NAMES and tuple(plain) == PLAIN
    made: dict[bool, WholePath] = {}

    def make(name: str) -> WholePath:
        if (name in plain) not in made:
            given = plain if name in plain else cases
            target = tmp_path_factory.mktemp("made")
            made[name in plain] = WholePath(media_toy("wan2.1-vace"), commands, target, given)
        return made[name in plain]

    return make


@pytest.mark.parametrize("name", [*NAMES, *PLAIN])
def test_latents_and_frames(path: Make, name: str, record_property: Any) -> None:
    made = path(name)
    made.check(name, record_property)
    latents, frames = made.ours(name, "step")
    assert latents.shape[2] == 3  # without those of references
    assert frames.shape[0] == 9


def test_two_experts(
    media_toy: Callable[[str], tuple[Path, Path]],
    commands: Any,
    tmp_path_factory: pytest.TempPathFactory,
    record_property: Any,
) -> None:
    """VACE-Fun-A14B: a high-noise and a low-noise expert, each with its own control blocks.

    In both forms of the loop: for one transformer, and without reference images, they differ in nothing else.
    """
    folder = tmp_path_factory.mktemp("experts")
    files = folder / "one.png", folder / "two.png"
    for number, file in enumerate(files):
        picture(131, 75, number).save(file)
    media = {
        "video": write_folder(pictures(9, 144, 96, 1), folder / "video"),
        "mask": write_folder(sample_mask(144, 96, 9), folder / "mask"),
        "reference_image": files,
    }
    cases = {"masked video": Case(5, media, 1), "scaled": Case(3, media, 2, SCALED)}
    made = WholePath(media_toy("wan2.2-vace"), commands, folder, cases)
    for name in cases:
        made.check(name, record_property)
        made.check_loops(name)
    pipe = made.reference.pipe
    pipe.transformer, pipe.transformer_2 = pipe.transformer_2, pipe.transformer
    made.forget()
    with pytest.raises(AssertionError):
        made.check("masked video", record_property)
