"""The profile of a request: by its shape, its guidance, its images, or its name."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from helpers.manifests import plain_manifest, with_model
from helpers.media_files import task_of
from helpers.options import PROFILE
from helpers.pictures import picture
from helpers.refusals import refuses
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.programs import Profile
from wanrun.errors import ArtifactError
from wanrun.media.inputs import Inputs, Media
from wanrun.request.generation import Generation
from wanrun.request.profiles import choose_profile, has_guidance
from wanrun.request.resolve import request_of, resolve_request


@pytest.fixture
def manifest(toy_artifact: Path) -> Manifest:
    """The toy with profiles of two sizes and lengths, the smaller one without guidance too; VACE's inputs."""
    manifest = read_manifest(toy_artifact)
    (small,) = manifest.profiles.values()
    large = structs.replace(small, width=192, height=128, index=1)
    long = structs.replace(small, num_frames=17, index=2)
    pair = structs.replace(small, num_videos=2, index=3)
    unguided = structs.replace(small, guidance=False, index=4)
    references = structs.replace(small, num_references=2, index=5)
    profiles = {one.name: one for one in (small, large, long, pair, unguided, references)}
    vace = {"task": task_of("wan2.1-vace"), "options": {"conditioning_scale": 1.0}}
    return with_model(manifest, **vace).changed(profiles=profiles)


SMALL, UNGUIDED, REFERENCES = "96x64x9-b1-cfg", "96x64x9-b1-nocfg", "96x64x9-b1-cfg-r2"


def chosen(
    manifest: Manifest, loaded: str = SMALL, given: Media | Inputs | None = None, **options: Any
) -> str:
    """The name of the profile of a generation with this one loaded."""
    media, inputs = (given, None) if isinstance(given, Media) else (None, given)
    return of(manifest, manifest.profiles[loaded], media, inputs, **options).profile.name


def of(manifest: Manifest, loaded: Profile | None = None, *given: Any, **options: Any) -> Generation:
    request = request_of({"prompt": "a fox", **options})
    return resolve_request(request, Artifact(manifest, Path("artifact")), *(given or (None, None)), loaded)


def test_what_is_not_said_is_as_loaded(manifest: Manifest) -> None:
    nothing = dict.fromkeys(("size", "num_frames", "num_videos", "guidance_scale"))
    for name in manifest.profiles:
        assert chosen(manifest, name) == chosen(manifest, name, **nothing) == name
    for loaded, shape, name in (
        (SMALL, {"size": (192, 128)}, "192x128x9-b1-cfg"),
        (SMALL, {"num_frames": 17}, "96x64x17-b1-cfg"),
        (SMALL, {"num_videos": 2}, "96x64x9-b2-cfg"),
        ("192x128x9-b1-cfg", {"size": (96, 64)}, SMALL),
    ):
        assert chosen(manifest, loaded, **shape) == name
    with refuses("not_built", ArtifactError, what="192x128, 9 frames", remedy="--num-videos 2"):
        chosen(manifest, "96x64x9-b2-cfg", size=(192, 128))


def test_without_guidance_a_profile_that_has_it_will_do(manifest: Manifest) -> None:
    """Where no other is built; a model of its own accord without guidance takes one without."""
    long = of(manifest, guidance_scale=1, num_frames=17)
    assert long.profile.name == "96x64x17-b1-cfg" and len(long.prompts) == 1
    assert chosen(manifest, UNGUIDED, guidance_scale=1, num_frames=17) == long.profile.name
    own = with_model(manifest, {"guidance_scale": 1.0})
    unguided = structs.replace(own.profiles[UNGUIDED], num_frames=33)
    own = own.changed(profiles={**own.profiles, unguided.name: unguided})
    assert chosen(own, SMALL) == SMALL and chosen(own, SMALL, num_frames=33) == unguided.name
    assert chosen(manifest, UNGUIDED) == UNGUIDED  # whatever the artifact's own scale
    for scale, option in ((1, "--no-guidance"), (3, "33 --guidance")):
        with refuses("not_built", ArtifactError, remedy=option):
            chosen(manifest, guidance_scale=scale, num_frames=33)


def test_reference_images_choose_too(manifest: Manifest) -> None:
    images = (picture(90, 70), picture(70, 90))
    arrays = {"references": np.zeros((2, 64, 96, 3), np.uint8)}
    for given in (Media(reference_image=images), Inputs(arrays)):
        assert chosen(manifest, given=given) == REFERENCES
        assert chosen(manifest, REFERENCES, given) == REFERENCES
    for given in (Media(), Inputs({"video": np.zeros(1)})):
        assert chosen(manifest, REFERENCES, given) == SMALL
    assert chosen(manifest, REFERENCES) == REFERENCES  # nothing was said
    with refuses("not_built", ArtifactError, what="1 reference", expected="96x64x9-b1-cfg, "):
        chosen(manifest, given=Media(reference_image=images[:1]))


def test_media_that_the_model_does_not_take(toy_artifact: Path) -> None:
    """That is what is wrong with them, not their number."""
    media = Media(reference_image=(picture(90, 70),))
    with refuses("unsupported", what="wan2.1-t2v") as caught:
        chosen(read_manifest(toy_artifact), given=media)
    assert caught.value.fields == ("reference_image",)


def test_a_profile_is_chosen_by_its_name(manifest: Manifest) -> None:
    for name, profile in manifest.profiles.items():
        assert chosen(manifest, profile=name) == name
        images = ("a.png",) * profile.num_references
        assert of(manifest, profile=name, reference_image=images).profile == profile
    assert of(manifest, profile=SMALL, size=(96, 64), num_frames=9).profile.name == SMALL
    with refuses("unknown_name", ArtifactError, what="'96x64'", expected=f"{SMALL}, "):
        chosen(manifest, profile="96x64")
    with refuses("no_effect", what=UNGUIDED, found=3) as caught:
        of(manifest, profile=UNGUIDED, guidance_scale=3)
    assert caught.value.fields == ("guidance_scale",)


@pytest.mark.parametrize(
    ("profile", "options", "parts"),
    [
        (SMALL, {"size": (192, 128)}, {"what": "size", "expected": "96x64", "found": "192x128"}),
        (SMALL, {"num_frames": 17}, {"what": "num_frames", "expected": 9, "found": 17}),
        (SMALL, {"num_videos": 2}, {"what": "num_videos", "expected": 1, "found": 2}),
        (SMALL, {"reference_image": "a.png"}, {"what": "reference_image", "expected": 0, "found": 1}),
        (REFERENCES, {}, {"what": "reference_image", "expected": 2, "found": 0}),
    ],
)
def test_a_named_profile_with_another_shape_is_refused(
    manifest: Manifest, profile: str, options: dict[str, Any], parts: dict[str, object]
) -> None:
    for loaded in (None, manifest.profiles[SMALL]):
        if options or loaded is None:
            with refuses("mismatch", remedy="profile", **parts):
                of(manifest, loaded, profile=profile, **options)


@pytest.mark.parametrize("built", [(SMALL,), (UNGUIDED,), (SMALL, UNGUIDED)])
@pytest.mark.parametrize("scale", [-2.0, 0.0, 1, 1.5, 5.0])
def test_guidance_is_decided_as_by_the_command(
    manifest: Manifest, scale: float, built: tuple[str, ...]
) -> None:
    """The same refusal, whichever profile was loaded; without guidance any profile will do."""
    profiles = {name: manifest.profiles[name] for name in built}
    some = manifest.changed(profiles=profiles, program_sets={}, targets={})
    expected: str | None = None
    with suppress(ArtifactError):
        expected = of(some, guidance_scale=scale).profile.name
    if scale > 1:
        assert expected == (SMALL if SMALL in built else None)
    else:
        assert expected == (UNGUIDED if UNGUIDED in built else SMALL)
    for loaded in built:
        if expected is not None:
            assert chosen(some, loaded, guidance_scale=scale) == (expected if scale > 1 else loaded)
            continue
        with refuses("not_built", ArtifactError, what="guidance on"):
            chosen(some, loaded, guidance_scale=scale)


def test_guidance_that_no_profile_has_is_a_warning(manifest: Manifest) -> None:
    def warnings(*names: str, **options: Any) -> int:
        some = {name: manifest.profiles[name] for name in names}
        return len(of(manifest.changed(profiles=some, program_sets={}, targets={}), **options).warnings)

    assert warnings(UNGUIDED) == warnings(UNGUIDED, "192x128x9-b1-cfg", size="96x64") == 1
    assert warnings(UNGUIDED, guidance_scale=1) == warnings(SMALL, UNGUIDED) == 0
    assert warnings(SMALL, UNGUIDED, profile=UNGUIDED) == 0  # which was asked for
    with refuses("not_built", ArtifactError):
        warnings(UNGUIDED, guidance_scale=3)


# Whoever asks: nothing but the shape is known, and no media.

LARGE = structs.replace(PROFILE, width=192, height=128, index=1)
OFF = structs.replace(PROFILE, guidance=False, index=3)
LARGE_OFF = structs.replace(LARGE, guidance=False, index=4)
BEGINS = structs.replace(PROFILE.options, video_to_video=True)
SLOTS = structs.replace(PROFILE, options=structs.replace(PROFILE.options, lora_rank=8))


def artifact(*profiles: Profile, scale: float = 4.0) -> Artifact:
    manifest = plain_manifest(profiles={one.name: one for one in profiles or (PROFILE, LARGE, OFF)})
    return Artifact(with_model(manifest, {"guidance_scale": scale}), Path("artifact"))


def test_the_model_s_own_guidance_gives_way() -> None:
    """Where nobody asks for guidance, and it is not built; if somebody does, this is refused."""
    assert choose_profile(artifact(OFF), {}) == OFF
    assert choose_profile(artifact(PROFILE, LARGE_OFF), {"size": (192, 128)}) == LARGE_OFF
    assert choose_profile(artifact(scale=1.0), {}) == OFF
    assert choose_profile(artifact(PROFILE, scale=1.0), {}) == PROFILE
    for where, guidance in ((artifact(OFF), True), (artifact(PROFILE, scale=1.0), False)):
        with refuses("not_built", ArtifactError, remedy="--guidance" if guidance else "--no-guidance"):
            choose_profile(where, {"guidance": guidance})
    manifest = artifact().manifest
    assert has_guidance(manifest) and not has_guidance(manifest, 1.0) and has_guidance(manifest, 1.5)


def test_where_guidance_is_off_a_profile_without_it_is_taken_unless_it_lacks_something() -> None:
    """Slots for LoRAs, or a video to begin with."""
    first = structs.replace(PROFILE, options=BEGINS)
    for built, expected in ((PROFILE, OFF), (SLOTS, SLOTS), (first, first)):
        assert choose_profile(artifact(built, OFF), {}, unguided=True) == expected
    assert SLOTS.compile_options == f"{PROFILE.compile_options} --lora-rank 8"


def test_a_video_to_begin_with_is_for_a_profile_that_takes_one() -> None:
    """It is chosen of all that fit; one of the asked shape that takes none is left to be refused."""
    can = structs.replace(LARGE, options=BEGINS)
    where = artifact(PROFILE, can)
    assert choose_profile(where, {}, begins=True) == can
    assert choose_profile(where, {}) == choose_profile(where, {"size": (96, 64)}, begins=True) == PROFILE
