"""Which profile a generation runs in, and where its images and videos come from."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from helpers.manifests import with_model
from helpers.media_files import task_of
from helpers.pictures import picture
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.errors import ArtifactError, UsageError
from wanrun.media.types import Inputs, Media
from wanrun.request.choice import asked_for, chosen_profile, media_asked_for
from wanrun.request.options import choose_profile


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
    return with_model(manifest, task=task_of("wan2.1-vace")).changed(profiles=profiles)


SMALL, UNGUIDED, REFERENCES = "96x64x9-b1-cfg", "96x64x9-b1-nocfg", "96x64x9-b1-cfg-r2"


def chosen(
    manifest: Manifest, loaded: str = SMALL, given: Media | Inputs | None = None, **options: Any
) -> str:
    profile = manifest.profiles[loaded]
    request = asked_for(profile, {"prompt": "a fox", **options})
    return chosen_profile(manifest, Path("artifact"), profile, request, given).name


def test_what_is_not_said_is_as_loaded(manifest: Manifest) -> None:
    for name in manifest.profiles:
        assert chosen(manifest, name) == name
        assert (
            chosen(manifest, name, size=None, num_frames=None, num_videos=None, guidance_scale=None) == name
        )
    assert chosen(manifest, size=(192, 128)) == "192x128x9-b1-cfg"
    assert chosen(manifest, num_frames=17) == "96x64x17-b1-cfg"
    assert chosen(manifest, num_videos=2) == "96x64x9-b2-cfg"
    assert chosen(manifest, "192x128x9-b1-cfg", size=(96, 64)) == SMALL


@pytest.mark.parametrize("scale", [1, 0.0, -3.0])
def test_a_scale_of_at_most_one_needs_no_guidance(manifest: Manifest, scale: float) -> None:
    assert chosen(manifest, guidance_scale=scale) == UNGUIDED
    assert chosen(manifest, UNGUIDED, guidance_scale=scale) == UNGUIDED
    with pytest.raises(ArtifactError, match=r"no profile is built for 96x64, 17 frames.*guidance off"):
        chosen(manifest, guidance_scale=scale, num_frames=17)


def test_a_scale_above_one_needs_guidance(manifest: Manifest) -> None:
    assert chosen(manifest, UNGUIDED, guidance_scale=1.5) == SMALL
    assert chosen(manifest, UNGUIDED) == UNGUIDED  # whatever the artifact's own scale
    profiles = {name: profile for name, profile in manifest.profiles.items() if name != SMALL}
    only = manifest.changed(profiles=profiles, program_sets={}, targets={})
    with pytest.raises(ArtifactError, match=r"no profile is built for 96x64, 9 frames.*guidance on"):
        chosen(only, UNGUIDED, guidance_scale=1.5)


def test_reference_images_choose_too(manifest: Manifest) -> None:
    images = (picture(90, 70), picture(70, 90))
    arrays = {"references": np.zeros((2, 64, 96, 3), np.uint8)}
    for given in (Media(reference_image=images), Inputs(arrays)):
        assert chosen(manifest, given=given) == REFERENCES
        assert chosen(manifest, REFERENCES, given) == REFERENCES
    for given in (Media(), Inputs({"video": np.zeros(1)})):
        assert chosen(manifest, REFERENCES, given) == SMALL
    assert chosen(manifest, REFERENCES) == REFERENCES  # nothing was said
    with pytest.raises(ArtifactError, match=r"1 reference image\(s\); expected one of 96x64x9-b1-cfg, "):
        chosen(manifest, given=Media(reference_image=images[:1]))


def test_media_that_the_model_does_not_take(toy_artifact: Path) -> None:
    """That is what is wrong with them, not their number."""
    media = Media(reference_image=(picture(90, 70),))
    with pytest.raises(UsageError, match=r"reference_image cannot be used with wan2.1-t2v"):
        chosen(read_manifest(toy_artifact), given=media)


def test_a_profile_is_chosen_by_its_name(manifest: Manifest) -> None:
    for name in manifest.profiles:
        assert chosen(manifest, profile=name) == name
        request = asked_for(manifest.profiles[SMALL], {"prompt": "a fox", "profile": name})
        images = ("a.png",) * manifest.profiles[name].num_references
        request = structs.replace(request, reference_image=images)
        assert choose_profile(manifest, Path("artifact"), request).name == name
    assert chosen(manifest, profile="192x128x9-b1-cfg", size=(192, 128), num_frames=9) == "192x128x9-b1-cfg"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"size": (96, 64)}, "has another size; expected 192x128; found 96x64; leave out size or profile"),
        ({"num_frames": 17}, "has another num_frames; expected 9; found 17"),
        ({"num_videos": 2}, "has another num_videos; expected 1; found 2"),
        ({"reference_image": "a.png"}, "has another reference_image; expected 0; found 1"),
    ],
)
def test_a_named_profile_with_another_shape_is_refused(
    manifest: Manifest, options: dict[str, Any], line: str
) -> None:
    request = asked_for(
        manifest.profiles[SMALL], {"prompt": "a fox", "profile": "192x128x9-b1-cfg", **options}
    )
    with pytest.raises(UsageError, match=f"^profile 192x128x9-b1-cfg {line}"):
        choose_profile(manifest, Path("artifact"), request)


def test_a_name_of_no_profile_is_refused(manifest: Manifest) -> None:
    with pytest.raises(ArtifactError, match=r"no profile is named '96x64'; expected one of 96x64x9-b1-cfg, "):
        chosen(manifest, profile="96x64")


def test_what_is_not_built_is_refused(manifest: Manifest) -> None:
    for options in ({"size": (192, 128), "num_frames": 17}, {"size": (64, 96)}, {"num_videos": 3}):
        with pytest.raises(ArtifactError, match=r"no profile is built for.*expected one of 96x64x9-b1-cfg, "):
            chosen(manifest, **options)


@pytest.mark.parametrize("built", [(SMALL,), (UNGUIDED,), (SMALL, UNGUIDED)])
@pytest.mark.parametrize("scale", [-2.0, 0.5, 1.0, 1.5, 5.0])
def test_guidance_is_decided_as_by_the_command(
    manifest: Manifest, scale: float, built: tuple[str, ...]
) -> None:
    """The same profile or the same refusal, whichever profile was loaded."""
    profiles = {name: manifest.profiles[name] for name in built}
    some = manifest.changed(profiles=profiles, program_sets={}, targets={})
    request = asked_for(profiles[built[0]], {"prompt": "a fox", "guidance_scale": scale})
    expected: str | None = None
    with suppress(ArtifactError):
        expected = choose_profile(some, Path("artifact"), request).name
    assert (expected is not None) == any(profiles[name].guidance == (scale > 1) for name in built)
    for loaded in built:
        if expected is not None:
            assert chosen(some, loaded, guidance_scale=scale) == expected
            continue
        with pytest.raises(ArtifactError, match=f"guidance {'on' if scale > 1 else 'off'}"):
            chosen(some, loaded, guidance_scale=scale)


def test_an_option_that_there_is_not(manifest: Manifest) -> None:
    with pytest.raises(UsageError, match="unknown option 'sizes'"):
        chosen(manifest, sizes=(96, 64))
    with pytest.raises(UsageError, match="num_videos is out of range"):
        chosen(manifest, num_videos=0)


def test_media_in_one_way(manifest: Manifest) -> None:
    """As options they are files; None of them is nothing said, and so what is given counts."""
    loaded, media = manifest.profiles[SMALL], Media(image="a.png")
    plain = asked_for(loaded, {"prompt": "a fox"})
    assert media_asked_for(plain, None, None) is None
    assert media_asked_for(plain, media, None) is media
    named = asked_for(loaded, {"prompt": "a fox", "image": "b.png", "segment_overlap": 5, "mode": "replace"})
    found = Media(image=Path("b.png"), mode="replace", segment_overlap=5)
    assert media_asked_for(named, None, None) == found
    for images in ("c.png", ("c.png", "d.png")):
        many = asked_for(loaded, {"prompt": "a fox", "reference_image": images})
        paths = (Path("c.png"), Path("d.png"))[: 1 if images == "c.png" else 2]
        assert media_asked_for(many, None, None) == Media(reference_image=paths)
    with pytest.raises(UsageError, match="image is given beside media"):
        media_asked_for(named, media, None)
    with pytest.raises(UsageError, match="image is given beside inputs"):
        media_asked_for(named, None, Inputs())
