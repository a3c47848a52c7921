"""The built profile of a shape, whoever asks for it: what is left out, what is loaded, what a name has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from helpers.manifests import plain_manifest, with_model
from helpers.options import PROFILE
from helpers.refusals import refuses
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.errors import ArtifactError, UsageError
from wanrun.request.profiles import choose_profile, has_guidance

LARGE = structs.replace(PROFILE, width=192, height=128, index=1)
PAIR = structs.replace(PROFILE, num_videos=2, index=2)
OFF = structs.replace(PROFILE, guidance=False, index=3)
LARGE_OFF = structs.replace(LARGE, guidance=False, index=4)


def manifest(*profiles: Profile, scale: float = 4.0) -> Manifest:
    built = {one.name: one for one in profiles or (PROFILE, LARGE, PAIR, OFF)}
    return with_model(plain_manifest(profiles=built), {"guidance_scale": scale})


def chosen(where: Manifest, loaded: Profile | None = None, **shape: Any) -> Profile:
    return choose_profile(Artifact(where, Path("artifact")), shape, loaded)


def test_without_a_loaded_one_it_is_the_first_that_fits() -> None:
    assert chosen(manifest()) == PROFILE and chosen(manifest(), size=None, guidance=None) == PROFILE
    assert chosen(manifest(), size=(192, 128)) == LARGE
    assert chosen(manifest(), guidance=False) == OFF
    assert chosen(manifest(), num_videos=2) == PAIR


def test_what_is_left_out_is_as_loaded() -> None:
    assert chosen(manifest(), PAIR) == PAIR and chosen(manifest(), OFF) == OFF
    assert chosen(manifest(), LARGE, size=(96, 64)) == PROFILE
    with refuses("not_built", ArtifactError, what="192x128, 9 frames", remedy="--num-videos 2"):
        chosen(manifest(), PAIR, size=(192, 128))


def test_the_model_s_own_guidance_gives_way() -> None:
    """Where nobody asks for guidance, and it is not built; if somebody does, this is refused."""
    assert chosen(manifest(OFF)) == OFF and chosen(manifest(PROFILE, LARGE_OFF), size=(192, 128)) == LARGE_OFF
    assert chosen(manifest(scale=1.0)) == OFF
    assert chosen(manifest(PROFILE, scale=1.0)) == PROFILE  # which makes videos without guidance too
    slots = structs.replace(PROFILE.options, lora_rank=8)
    with_slots = structs.replace(PROFILE, options=slots)
    assert with_slots.compile_options == f"{PROFILE.compile_options} --lora-rank 8"
    for loras in (manifest(PROFILE, OFF), manifest(with_slots, OFF)):
        taken = choose_profile(Artifact(loras, Path("a")), {}, unguided=True)
        assert taken.name == (OFF if loras.profiles[PROFILE.name] == PROFILE else PROFILE).name
    for where, guidance in ((manifest(OFF), True), (manifest(PROFILE, scale=1.0), False)):
        with refuses("not_built", ArtifactError, remedy="--guidance" if guidance else "--no-guidance"):
            chosen(where, guidance=guidance)
    assert has_guidance(manifest()) and not has_guidance(manifest(), 1.0) and has_guidance(manifest(), 1.5)


def test_a_video_to_begin_with_is_for_a_profile_that_takes_one() -> None:
    """It is chosen of all that fit; one of the asked shape that takes none is left to be refused."""
    size, with_video = {"size": (96, 64)}, structs.replace(PROFILE.options, video_to_video=True)
    can = structs.replace(LARGE, options=with_video)
    where = Artifact(manifest(PROFILE, can), Path("artifact"))
    assert choose_profile(where, {}, begins=True) == can
    assert choose_profile(where, {}) == choose_profile(where, size, begins=True) == PROFILE
    first = structs.replace(PROFILE, options=with_video)
    assert choose_profile(Artifact(manifest(first, OFF), Path("a")), {}, unguided=True) == first


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"size": (96, 64)}, "has another size; expected 192x128; found 96x64; leave out size or profile"),
        ({"num_frames": 17}, "has another num_frames; expected 9; found 17"),
        ({"num_videos": 2}, "has another num_videos; expected 1; found 2"),
        ({"num_references": 1}, "has another reference_image; expected 0; found 1"),
    ],
)
def test_a_named_profile_with_another_shape_is_refused(options: dict[str, Any], line: str) -> None:
    for loaded in (None, PROFILE):
        with pytest.raises(UsageError, match=f"^profile 192x128x9-b1-cfg {line}"):
            chosen(manifest(), loaded, profile="192x128x9-b1-cfg", **options)
    assert chosen(manifest(), profile="192x128x9-b1-cfg", size=(192, 128), num_frames=9) == LARGE


def test_a_name_of_no_profile_is_refused() -> None:
    with refuses("unknown_name", ArtifactError, what="'96x64'", expected="96x64x9-b1-cfg, "):
        chosen(manifest(), profile="96x64")
