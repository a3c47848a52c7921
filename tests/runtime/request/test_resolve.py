"""A request is resolved: media, clips, windows, lengths, experts, and what has no effect."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from helpers.fake_pipeline import make_two_experts
from helpers.manifests import plain_model, with_model
from helpers.media_files import task_of
from helpers.pictures import picture
from helpers.refusals import refuses
from wanbuild.variants.from_video import with_start
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.model import Chunking
from wanrun.artifact.programs import Profile
from wanrun.codes import ErrorCode
from wanrun.errors import ArtifactError, UsageError, WanError
from wanrun.media.inputs import Inputs, Media
from wanrun.request.generation import Generation
from wanrun.request.lengths import check_live, length_of
from wanrun.request.resolve import request_of, resolve, resolve_request


@pytest.fixture
def manifest(toy_artifact: Path) -> Manifest:
    """The toy as a model that takes VACE's inputs."""
    vace = {"task": task_of("wan2.1-vace"), "options": {"conditioning_scale": 1.0}}
    return with_model(read_manifest(toy_artifact), **vace)


def of(manifest: Manifest, loaded: Profile | None = None, *given: Any, **options: Any) -> Generation:
    request = request_of({"prompt": "a fox", **options})
    return resolve_request(request, Artifact(manifest, Path("artifact")), *(given or (None, None)), loaded)


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
    request, (built,) = request_of({"prompt": "a"}), manifest.profiles.values()
    step = structs.replace(built, options=structs.replace(built.options, loop="step"))
    for profile, loop, expected in ((built, "scan", "scan"), (built, None, "step"), (step, "scan", "step")):
        some = manifest.changed(profiles={built.name: profile})
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


@pytest.mark.parametrize(
    ("options", "code", "what"),
    [
        ({"size": (64, 64)}, "not_built", "64x64"),
        ({"image": "a.png"}, "unsupported", "image"),
        ({"image": b"a"}, "wrong_type", "image"),
        ({"media": 5}, "wrong_type", "media"),
        ({"boundary": 0.5}, "no_effect", "boundary"),
        ({"steps_high": 1, "steps_low": 1}, "no_effect", "steps_high"),
        ({"num_steps": 0}, "out_of_range", "num_steps"),
    ],
)
def test_a_request_that_cannot_be_made(
    toy_artifact: Path, options: dict[str, Any], code: ErrorCode, what: str
) -> None:
    with refuses(code, WanError, what=what):
        resolve(toy_artifact, "a fox", **options)


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
    cases: list[tuple[dict[str, Any], ErrorCode, dict[str, object]]] = [
        ({"steps_low": 2}, "conflict", {"found": "steps_high"}),
        ({**split, "num_steps": 9}, "conflict", {"what": "num_steps", "expected": 8}),
        ({**split, "boundary": 1.0}, "conflict", {"what": "boundary", "expected": 7, "found": 0}),
        ({**split, "timesteps": [900, 500]}, "conflict", {"what": "timesteps"}),
    ]
    for options, code, parts in cases:
        with refuses(code, **parts):
            resolve(artifact, "a", **options)


def test_windows_are_recorded_and_counted(toy_artifact: Path) -> None:
    generation = resolve(toy_artifact, "a fox", num_frames=33, window_frames=9, num_steps=2)
    facts = {name: generation.options[name] for name in ("num_frames", "window_frames", "window_overlap")}
    assert facts == {"num_frames": 33, "window_frames": 9, "window_overlap": 4}
    assert generation.latents_shape[2] == 9 and generation.cost().windows == 4
    assert generation.cost().steps == 8 and generation.cost().frames == 33


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_frames": 16, "window_frames": 9}, "num_frames"),
        ({"num_frames": 5, "window_frames": 9}, "num_frames"),
        ({"num_frames": 90_001, "window_frames": 9}, "num_frames"),
        ({"num_frames": 17, "window_frames": 8}, "window_frames"),
        ({"num_frames": 17, "window_overlap": 3}, "window"),
        ({"num_frames": 17, "window_overlap": 12}, "window"),
        ({"window_overlap": 4}, "window_overlap"),
    ],
)
def test_what_windows_do_not_make(toy_artifact: Path, options: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        resolve(toy_artifact, "a fox", **options)


@pytest.mark.parametrize(
    ("seconds", "fps", "frames"),
    [(5, 16, 81), (1.1, 16, 17), (1.2, 16, 21), (0.01, 16, 1), (3, 1, 5), (5, 24, 121), (5.0625, 16, 81)],
)
def test_seconds_are_the_nearest_frames(seconds: float, fps: float, frames: int) -> None:
    assert length_of(plain_model(vae_temporal=4), seconds, fps) == frames


@pytest.mark.parametrize(
    ("frames", "decoder", "named"),
    [
        (None, None, None),
        (9, "full", None),
        (10, None, "num_frames"),
        (0, None, "num_frames"),
        (True, None, "num_frames"),
        (9.0, None, "num_frames"),
        (9, "tiny", "decoder"),
    ],
)
def test_a_live_video(toy_artifact: Path, frames: Any, decoder: str | None, named: str | None) -> None:
    once = read_manifest(toy_artifact)
    with pytest.raises(UsageError, match=once.model.variant):
        check_live(once, frames, "num_frames", decoder)
    chunked = with_model(once, chunks=Chunking(first=1, each=3))
    fields: tuple[str | None, ...] = (None,)
    try:
        check_live(chunked, frames, "num_frames", decoder)
    except UsageError as error:
        fields = error.fields
    assert fields == (named,)
