"""A request is resolved: its profile, which reference images and guidance choose too, and all else of it."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from helpers.fake_pipeline import make_two_experts
from helpers.manifests import with_model
from helpers.media_files import task_of
from helpers.pictures import picture
from helpers.refusals import refuses
from wanbuild.variants.from_video import with_start
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.programs import Profile
from wanrun.errors import ArtifactError, UsageError, WanError
from wanrun.media.inputs import Inputs, Media
from wanrun.request.generation import Generation
from wanrun.request.resolve import request_of, resolve, resolve_request


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
    """It takes a profile without, if one is built and none is loaded; one with guidance does it as well."""
    assert of(manifest, guidance_scale=scale).profile.name == UNGUIDED
    assert chosen(manifest, UNGUIDED, guidance_scale=scale) == UNGUIDED
    assert chosen(manifest, SMALL, guidance_scale=scale) == SMALL
    long = of(manifest, guidance_scale=scale, num_frames=17)
    assert long.profile.name == "96x64x17-b1-cfg" and len(long.prompts) == 1
    with pytest.raises(ArtifactError) as caught:
        chosen(manifest, guidance_scale=scale, num_frames=33)
    assert "--no-guidance" in str(caught.value.remedy)


def test_a_model_without_guidance_needs_none(manifest: Manifest) -> None:
    """Where a profile with guidance is loaded too: of another size one without will do."""
    own = with_model(manifest, {"guidance_scale": 1.0})
    unguided = structs.replace(own.profiles[UNGUIDED], num_frames=33)
    own = own.changed(profiles={**own.profiles, unguided.name: unguided})
    assert chosen(own, SMALL) == SMALL and chosen(own, SMALL, num_frames=33) == unguided.name


def test_a_scale_above_one_needs_guidance(manifest: Manifest) -> None:
    assert chosen(manifest, UNGUIDED, guidance_scale=1.5) == SMALL
    assert chosen(manifest, UNGUIDED) == UNGUIDED  # whatever the artifact's own scale
    profiles = {name: profile for name, profile in manifest.profiles.items() if name != SMALL}
    only = manifest.changed(profiles=profiles, program_sets={}, targets={})
    with refuses("not_built", ArtifactError, what="96x64, 9 frames", remedy="9 --guidance"):
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
    with refuses("not_built", ArtifactError, what="1 reference", expected="96x64x9-b1-cfg, "):
        chosen(manifest, given=Media(reference_image=images[:1]))


def test_media_that_the_model_does_not_take(toy_artifact: Path) -> None:
    """That is what is wrong with them, not their number."""
    media = Media(reference_image=(picture(90, 70),))
    with refuses("unsupported", what="wan2.1-t2v") as caught:
        chosen(read_manifest(toy_artifact), given=media)
    assert caught.value.fields == ("reference_image",)


def test_a_video_to_begin_with(toy_artifact: Path) -> None:
    """It has a strength, which is recorded, decides the steps, and is refused without it."""
    plain = read_manifest(toy_artifact)
    (profile,) = plain.profiles.values()
    other = structs.replace(profile, width=192, options=structs.replace(profile.options, video_to_video=True))
    manifest = plain.changed(
        **with_start(plain, built=True), profiles={one.name: one for one in (profile, other)}
    )
    video, arrays = Media(video=[picture(96, 64)] * 9), Inputs({"start_video": np.zeros(1)})
    for given, strength, steps in (((video, None), None, 8), ((None, arrays), 0.5, 5)):
        found = of(manifest, other, *given, strength=strength, num_steps=10)
        assert found.options["strength"] == (strength or 0.8) and len(found.table.timesteps) == steps
        calls = found.cost().calls
        assert calls["start"] == 1 and calls["window"] == 0 and found.options["num_steps"] == 10
        assert (found.media is None) == (given[0] is None)
    assert (
        of(manifest, other).options.get("strength") is None and of(manifest, other).cost().calls["start"] == 0
    )
    few = structs.replace(other, options=structs.replace(other.options, max_steps=4))
    short = manifest.changed(profiles={one.name: one for one in (profile, few)})
    for strength, loop in ((0.5, "scan"), (1.0, None)):  # the steps that are left fit the scan form's table
        left = of(short, few, video, None, strength=strength, num_steps=8, loop=loop)
        assert len(left.table.timesteps) == 8 * strength
    with pytest.raises(UsageError):
        of(short, few, video, None, strength=1.0, num_steps=8, loop="scan")
    windows = {"num_frames": 17, "window_frames": 9}
    assert of(manifest, other, Media(), None, **windows).blending is not None  # of no media
    for wrong, error, fields, given in (
        ((manifest, other), UsageError, ("strength", "video"), {"strength": 0.5}),
        ((plain,), UsageError, ("strength",), {"strength": 0.5}),
        ((manifest, profile, video, None), ArtifactError, (), {}),
        ((plain, profile, video, None), UsageError, ("video",), {}),
    ):
        with pytest.raises(error) as caught:
            of(*wrong, **given)  # type: ignore[arg-type]
        assert caught.value.fields == fields  # type: ignore[attr-defined]
        assert (other.name in str(caught.value)) == (error is ArtifactError)


def test_clips_continue_a_first_image_alone(toy_artifact: Path) -> None:
    """Of files, and of what was read."""
    manifest = with_model(read_manifest(toy_artifact), task=task_of("wan2.2-i2v", encoder=False))
    first, both = (
        {name: np.zeros((9, 6, 3), np.uint8) for name in ("image", "last_image")[:n]} for n in (1, 2)
    )
    for media in ((Media(**first), None), (None, Inputs(first))):
        assert of(manifest, None, *media, clips=3).counts().frames == 25
    for media in ((Media(**both), None), (None, Inputs(both))):
        with pytest.raises(UsageError) as error:
            of(manifest, None, *media, clips=3)
        assert error.value.fields == ("clips", "last_image")


def test_windows_are_of_text_alone(toy_artifact: Path) -> None:
    """Clips are for those that take a first image, and may leave it out."""
    plain, first = read_manifest(toy_artifact), {"image": np.zeros((9, 6, 3), np.uint8)}
    windows = {"num_frames": 17, "window_frames": 9}
    always = {"num_frames", "window_frames", "window_overlap"}
    cases: list[tuple[str, dict[str, Any], set[str]]] = [
        ("wan2.2-i2v", {}, {"clips"}),
        ("wan2.2-ti2v", {}, {"image", "clips"}),
        ("wan2.2-ti2v", {"clips": 2}, {"image", "clips"}),
        ("wan2.2-vace", {}, set()),
    ]
    for variant, more, fields in cases:
        manifest = with_model(plain, task=task_of(variant, encoder=False))
        media = Media() if "vace" in variant else Media(**first)
        with pytest.raises(UsageError) as error:
            of(manifest, None, media, None, **windows, **more)
        assert {*error.value.fields} == always | fields
    manifest = with_model(plain, task=task_of("wan2.2-ti2v", encoder=False))
    assert of(manifest, None, Media(), None, **windows).blending is not None


def test_later_clips_may_have_prompts_of_their_own(toy_artifact: Path) -> None:
    """The last one holds for the rest; the negative prompt stays the last of all."""
    manifest = with_model(read_manifest(toy_artifact), task=task_of("wan2.2-i2v", encoder=False))
    media = Media(image=np.zeros((9, 6, 3), np.uint8))
    made = of(manifest, None, media, clips=4, clip_prompts="b\r\n\n c \n")
    assert made.prompts[1:-1] == ("b", "c") and made.cost().calls["text"] == 4
    assert 4 * made.counts().after(3).told_steps == made.counts().told_steps
    for given in ({"clips": 2}, {}):
        with pytest.raises(UsageError) as error:
            of(manifest, None, media, clip_prompts="b\nc", **given)
        assert error.value.fields == ("clip_prompts", "clips")
    with pytest.raises(UsageError):
        of(read_manifest(toy_artifact), clip_prompts="b")


def test_a_profile_is_chosen_by_its_name(manifest: Manifest) -> None:
    for name, profile in manifest.profiles.items():
        assert chosen(manifest, profile=name) == name
        images = ("a.png",) * profile.num_references
        assert of(manifest, profile=name, reference_image=images).profile == profile
    with refuses("mismatch", what="reference_image", expected=0, found=1):
        of(manifest, profile=SMALL, reference_image="a.png")
    with refuses("mismatch", what="reference_image", expected=2, found=0):
        of(manifest, profile=REFERENCES)
    with refuses("no_effect", what=UNGUIDED, found=3) as caught:
        of(manifest, profile=UNGUIDED, guidance_scale=3)
    assert caught.value.fields == ("guidance_scale",)


def test_what_is_not_built_is_refused(manifest: Manifest) -> None:
    for options in ({"size": (192, 128), "num_frames": 17}, {"size": (64, 96)}, {"num_videos": 3}):
        with refuses("not_built", ArtifactError, expected="96x64x9-b1-cfg, "):
            chosen(manifest, **options)


@pytest.mark.parametrize("built", [(SMALL,), (UNGUIDED,), (SMALL, UNGUIDED)])
@pytest.mark.parametrize("scale", [-2.0, 0.5, 1.0, 1.5, 5.0])
def test_guidance_is_decided_as_by_the_command(
    manifest: Manifest, scale: float, built: tuple[str, ...]
) -> None:
    """The same refusal, whichever profile was loaded; without guidance any profile will do."""
    profiles = {name: manifest.profiles[name] for name in built}
    some = manifest.changed(profiles=profiles, program_sets={}, targets={})
    expected: str | None = None
    with suppress(ArtifactError):
        expected = of(some, guidance_scale=scale).profile.name
    assert (expected is not None) == any(profiles[name].guidance >= (scale > 1) for name in built)
    for loaded in built:
        if expected is not None:
            assert chosen(some, loaded, guidance_scale=scale) == (expected if scale > 1 else loaded)
            continue
        with pytest.raises(ArtifactError, match="guidance on"):
            chosen(some, loaded, guidance_scale=scale)


def test_an_option_that_there_is_not(manifest: Manifest) -> None:
    with refuses("unknown_parameter", what="'sizes'", remedy="size"):
        chosen(manifest, sizes=(96, 64))
    with refuses("out_of_range", what="num_videos", found=0):
        chosen(manifest, num_videos=0)


def test_guidance_that_no_profile_has_is_a_warning(manifest: Manifest) -> None:
    def warnings(*names: str, **options: Any) -> int:
        some = {name: manifest.profiles[name] for name in names}
        return len(of(manifest.changed(profiles=some, program_sets={}, targets={}), **options).warnings)

    assert warnings(UNGUIDED) == warnings(UNGUIDED, "192x128x9-b1-cfg", size="96x64") == 1
    assert warnings(UNGUIDED, guidance_scale=1) == warnings(SMALL, UNGUIDED) == 0
    assert warnings(SMALL, UNGUIDED, profile=UNGUIDED) == 0  # which was asked for
    with refuses("not_built", ArtifactError):
        warnings(UNGUIDED, guidance_scale=3)


def test_what_has_no_effect_is_a_warning(manifest: Manifest) -> None:
    distilled = with_model(manifest, {"num_steps": 2, "timesteps": (1000.0, 500.0)})
    own = distilled.model.defaults

    def warnings(**options: Any) -> int:
        return len(of(distilled, **options).warnings)

    assert warnings() == warnings(num_steps=2, solver=own.solver, flow_shift=own.flow_shift) == 0
    assert warnings(num_steps=3) == warnings(flow_shift=own.flow_shift + 1) == 1
    assert warnings(timesteps=(900, 500)) == warnings(timesteps=(900, 500), num_steps=2) == 0
    assert warnings(timesteps=(900, 500), flow_shift=own.flow_shift + 1) == 1
    assert warnings(timesteps=(900, 500), flow_shift=own.flow_shift + 1, solver="dmd") == 0
    assert warnings(negative_prompt="fog") == warnings(negative_prompt="", guidance_scale=1) == 0
    assert warnings(negative_prompt="fog", guidance_scale=1) == 1


def test_what_is_resolved(manifest: Manifest) -> None:
    found = of(manifest, seed=3, num_steps=4, conditioning_scale=0.5, fps=24, loop="scan")
    assert found.options.items() >= {"seed": 3, "num_steps": 4, "width": 96, "negative_prompt": ""}.items()
    again = pickle.loads(pickle.dumps(found))  # for another process
    assert again.options == found.options and again.manifest.manifest_digest == manifest.manifest_digest
    assert len(found.table.timesteps) == 4 and found.fps == 24.0 and found.options["loop"] == "scan"
    assert [(part.transformer, part.first, part.last) for part in found.ranges] == [("transformer", 0, 4)]
    assert found.prompts == ("a fox", "") and found.media == Media()  # the model encodes a blank video
    assert of(manifest, guidance_scale=1).prompts == ("a fox",)
    assert of(manifest, image=None, video="v.mp4").media == Media(video=Path("v.mp4"))
    inputs = Inputs({"video": np.zeros(1)})
    assert of(manifest, None, None, inputs).media is None
    with refuses("out_of_range", what="seed", found=2**64):
        of(manifest, seed=2**64)


def test_the_form_of_the_loop(manifest: Manifest) -> None:
    """That of ``load`` is the default where it is built."""
    request, built = request_of({"prompt": "a"}), manifest.profiles[SMALL]
    step = structs.replace(built, options=structs.replace(built.options, loop="step"))
    for profile, loop, expected in ((built, "scan", "scan"), (built, None, "step"), (step, "scan", "step")):
        some = manifest.changed(profiles={SMALL: profile})
        found = resolve_request(request, Artifact(some, Path("artifact")), loop=loop)
        assert found.options["loop"] == expected


def test_the_first_expert(artifact: Path) -> None:
    make_two_experts(artifact)
    assert resolve(artifact, "a").ranges[0].transformer == "transformer"
    assert resolve(artifact, "a", boundary=1.0).ranges[0].transformer == "transformer_2"


def test_a_negative_prompt_that_no_step_reads_is_a_warning(artifact: Path) -> None:
    """Also where the scale of the expert that makes the steps alone is 1."""
    make_two_experts(artifact)
    for boundary, prompts in ((0.5, 2), (1.0, 1)):
        scales = {"guidance_scale": 4, "guidance_scale_2": 1, "boundary": boundary}
        found = resolve(artifact, "a", "blurred", **scales)
        assert (len(found.prompts), len(found.warnings)) == (prompts, 2 - prompts)


def test_a_request_is_resolved_without_its_files(toy_artifact: Path, tmp_path: Path) -> None:
    """Of the artifact its manifest alone is read, and neither JAX nor Pillow is imported."""
    for name in ("manifest.json", "manifest.sha256"):
        if (toy_artifact / name).exists():
            shutil.copy(toy_artifact / name, tmp_path)
    code = (
        "import sys, wanrun; found = wanrun.resolve(sys.argv[1], 'a fox', num_inference_steps=3);"
        "print(found.options['num_steps'], found.cost().steps, {'jax', 'PIL'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "3 3 set()\n"


def test_a_request_that_cannot_be_made(toy_artifact: Path, tmp_path: Path) -> None:
    for options, line in (
        ({"size": (64, 64)}, "no profile is built for 64x64"),
        ({"image": "a.png"}, "image cannot be used with wan2.1-t2v"),
        ({"image": b"a"}, "image has the wrong type; expected the path of a file"),
        ({"media": 5}, "media has the wrong type"),
        ({"boundary": 0.5}, "boundary has no effect"),
        ({"steps_high": 1, "steps_low": 1}, "steps_high has no effect: this model has one transformer"),
        ({"num_steps": 0}, "num_steps is out of range"),
    ):
        with pytest.raises(WanError, match=line):
            resolve(toy_artifact, "a fox", **options)
    with pytest.raises(ArtifactError):
        resolve(tmp_path, "a fox")


def test_the_steps_of_each_expert_are_a_spelling_of_the_boundary(artifact: Path) -> None:
    """Metadata has both; the boundary alone gives the same ranges again, and so do all of them together."""
    make_two_experts(artifact)
    for solver, high, low in (("unipc", 1, 1), ("euler", 2, 2), ("lcm", 1, 7), ("dpm++", 7, 1)):
        split = {"steps_high": high, "steps_low": low}
        found = resolve(artifact, "a", solver=solver, **split)
        assert [part.last - part.first for part in found.ranges] == [high, low]
        steps = {"num_steps": high + low, "boundary": found.options["boundary"], "solver": solver}
        assert found.options.items() >= {**split, **steps}.items()
        again = resolve(artifact, "a", **steps)
        assert again.ranges == found.ranges and "steps_high" not in again.options
        assert resolve(artifact, "a", **split, **steps).options == found.options
    for options, line in (
        ({"steps_low": 2}, "steps_high and steps_low belong together"),
        ({**split, "num_steps": 9}, "num_steps contradicts steps_high and steps_low; expected 8"),
        ({**split, "boundary": 1.0}, "boundary contradicts steps_high and steps_low; expected 7 .* found 0"),
        ({**split, "timesteps": [900, 500]}, "num_steps and timesteps contradict"),
    ):
        with pytest.raises(UsageError, match=line):
            resolve(artifact, "a", **options)
