"""Video from a first image, or from a first and a last one, against diffusers' WanImageToVideoPipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.pictures import picture
from helpers.whole_path import Case, WholePath

# diffusers hands arrays to NumPy in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

Toys = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A landscape and a portrait picture, of sizes that are no multiples of anything."""
    folder = tmp_path_factory.mktemp("images")
    files = folder / "first.png", folder / "last.png"
    picture(131, 75, 1).save(files[0])
    picture(83, 121, 2).save(files[1])
    return files


def cases(variant: str, images: tuple[Path, Path]) -> Mapping[str, Case]:
    first, last = images
    both = {"image": first, "last_image": last}
    if variant == "wan2.1-i2v":
        other = {"solver": "dpm++", "flow_shift": 5.0}
        return {"unipc": Case(4, {"image": first}, 7), "dpm++": Case(3, {"image": last}, 1, other)}
    if variant == "wan2.1-flf2v":
        swapped = {"image": last, "last_image": first}
        return {"unipc": Case(4, both, 2), "swapped": Case(3, swapped, 3)}
    if variant == "wan2.2-i2v":
        scales = {"guidance_scale_2": 2.0}
        return {
            "two experts": Case(4, {"image": first}, 4, scales),
            "with a last image": Case(4, both, 5, scales),
        }
    return {
        "image": Case(4, {"image": first}, 6),
        "another image": Case(3, {"image": last}, 7),
        "text alone": Case(3, {}, 8),
    }


NAMES = [
    (variant, name)
    for variant in ("wan2.1-i2v", "wan2.1-flf2v", "wan2.2-i2v", "wan2.2-ti2v")
    for name in cases(variant, (Path(), Path()))
]


@pytest.fixture(scope="module")
def paths(
    media_toy: Toys,
    images: tuple[Path, Path],
    commands: Any,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Callable[[str], WholePath]:
    made: dict[str, WholePath] = {}

    def path(variant: str) -> WholePath:
        if variant not in made:
            folder, given = tmp_path_factory.mktemp(variant), cases(variant, images)
            if variant == "wan2.2-ti2v":
                toy = request.getfixturevalue("ti2v_checkpoint"), request.getfixturevalue("ti2v_artifact")
                made[variant] = WholePath(toy, commands, folder, given, (160, 96, 13))
            else:
                made[variant] = WholePath(media_toy(variant), commands, folder, given)
        return made[variant]

    return path


@pytest.mark.parametrize(("variant", "name"), NAMES)
def test_latents_and_frames(
    paths: Callable[[str], WholePath], variant: str, name: str, record_property: Any
) -> None:
    path = paths(variant)
    path.check(name, record_property)
    added = path.reference.pipe.transformer.config.added_kv_proj_dim
    assert added is not None or variant.startswith("wan2.2")


@pytest.mark.thorough
@pytest.mark.parametrize(("variant", "name"), [item for item in NAMES if item[0] == "wan2.2-ti2v"])
def test_both_loops_are_the_same(paths: Callable[[str], WholePath], variant: str, name: str) -> None:
    """One executable for all steps computes what one for each does: on the CPU to the bit.

    Image tokens, which these have not, are in Animate's, and come to the steps in the same way.
    """
    paths(variant).check_loops(name)


def test_the_first_frame_is_held(paths: Callable[[str], WholePath]) -> None:
    """TI2V's first latent frame is the image's, whatever the seed; the others are not."""
    path = paths("wan2.2-ti2v")
    (one, _), (other, _) = path.ours("image", "step"), path.ours("text alone", "step")
    held = path.theirs("image").calls[0].latents[:, :, 0]
    assert np.abs(one[:, :, 0] - held).max() < 1e-5
    assert np.abs(other[:, :, 0] - held).max() > 0.1
