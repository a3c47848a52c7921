"""Arguments of the Python API: values of Python and NumPy are taken, wrong types refused in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wanrun
from helpers.damage import linked
from helpers.manifests import plain_manifest
from helpers.media_files import make_task
from helpers.pictures import picture
from helpers.refusals import check_refusal, refuses
from wanrun.artifact.artifact import open_artifact
from wanrun.codes import ErrorCode
from wanrun.errors import ArtifactError, UsageError, WanError
from wanrun.generation.pipeline import Pipeline
from wanrun.opened.policy import LoadPolicy
from wanrun.request.arguments import array_of, artifact_of, policy_of, texts_of

PROMPT = "a fox in the snow"


def refused(call: Callable[..., Any], *arguments: Any, **options: Any) -> WanError:
    """A call's UsageError, which has one line."""
    with pytest.raises(UsageError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def check_type(error: WanError, name: str, expected: str, found: object = "") -> None:
    """Checks the error for a value of another type."""
    check_refusal(error, "wrong_type", what=name, expected=expected, found=found)


class NoPath:
    def __fspath__(self) -> bytes:
        return b"artifact"


class Tensor:
    def __array__(self, *arguments: object, **options: object) -> np.ndarray:
        raise TypeError("it is on another device")


@pytest.mark.parametrize("artifact", [5, None, b"artifact", ["artifact"], NoPath()])
def test_an_artifact_that_is_no_path(artifact: Any) -> None:
    check_type(refused(wanrun.load, artifact), "artifact", "path")


@pytest.mark.parametrize("artifact", ["", "a\0b", "\ud800", "a" * 4096])
def test_a_folder_that_cannot_be(artifact: str) -> None:
    error = refused(wanrun.load, artifact)
    check_refusal(error, "wrong_type", what="artifact")
    assert error.found and error.expected is None


def test_a_folder(tmp_path: Path) -> None:
    plain_manifest().write(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    artifact = artifact_of(tmp_path / "link")
    assert artifact == artifact_of(str(tmp_path / "link")) and artifact.folder == tmp_path.resolve()
    assert artifact_of(artifact) == artifact == artifact_of(open_artifact(tmp_path / "link"))
    with refuses("missing_file", ArtifactError, remedy="convert Wan-AI/Wan2.1 "):
        artifact_of("Wan-AI/Wan2.1")


@pytest.mark.parametrize(
    ("name", "expected", "bad"),
    [
        ("size", "(width, height)", ["96", (96,), (96, 64, 3), (96.0, 64), 96, b"96x64"]),
        ("num_frames", "an integer", ["9", 9.0, True, b"9", [9], "\ud800"]),
        ("num_videos", "an integer", [None]),
        ("guidance", "True or False", [1, "yes", 5.0]),
        ("lazy", "True or False", [np.int64(1), None]),
        ("target", "a string", [5, b"cpu"]),
        ("verify", "a string", [True, None]),
        ("weights", "a string", [5, b"weights"]),
        ("inputs", "wanrun's Inputs", [{}]),
        ("timings", "wanrun's Timings", [True]),
        ("warn", "a function", [None]),
        ("report", "a function", ["print"]),
        ("prompts", "list of strings", [PROMPT, b"a fox", [PROMPT, 5], [b"a fox"], 5, {PROMPT}, [None]]),
    ],
)
def test_choices_of_another_type(name: str, expected: str, bad: list[Any]) -> None:
    """Whatever the artifact: it is not looked at."""
    for value in bad:
        check_type(refused(wanrun.load, "no such artifact", **{name: value}), name, expected)


def test_every_choice_has_a_type() -> None:
    for name in LoadPolicy.__struct_fields__:  # which test_choices_of_another_type has of each kind
        error = refused(wanrun.load, "no such artifact", **{name: object()})
        check_type(error, name, "", '"object"')
        assert error.expected
    for name, expected in (("verify", "sha256"), ("memory", "low"), ("transfer", ""), ("embeddings", "none")):
        error = refused(wanrun.load, "a", **{name: "md5"})
        check_refusal(error, "invalid_value", what=f"{name} cannot be 'md5'", expected=expected)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sizes", ("size",)),
        ("progres", ("progress",)),
        ("frames", ("num_frames",)),
        ("steps", ()),
        ("device", ("target",)),
        ("xyz", None),
    ],
)
def test_choices_that_there_are_not(name: str, fields: tuple[str, ...] | None) -> None:
    error = refused(wanrun.load, "a", **{name: 1})
    check_refusal(error, "unknown_parameter", what=repr(name), expected="--help" if fields is None else "")
    assert fields is None or (error.fields == fields and error.remedy)


def test_choices_of_numpy(tmp_path: Path) -> None:
    plain = {"size": (96, 64), "num_frames": 9, "guidance": True, "lazy": False, "weights": str(tmp_path)}
    given = {
        "size": np.array([96, 64]),
        "num_frames": np.int32(9),
        "guidance": np.bool_(True),
        "lazy": np.False_,
        "weights": tmp_path,
    }
    assert policy_of(given) == policy_of(plain)
    for size in ([np.int64(96), 64], "96x64", "96*64"):
        assert policy_of({"size": size}) == LoadPolicy(size=(96, 64))
    assert policy_of({"size": None, "num_frames": None, "guidance": None, "target": None}) == LoadPolicy()
    for prompts in ([PROMPT, ""], (PROMPT, ""), np.array([PROMPT, ""])):
        assert texts_of(prompts) == [PROMPT, ""]
    array = np.zeros(3, np.float32)
    assert array_of(array) is array


@pytest.fixture(scope="module")
def pipeline(toy_artifact: Path) -> Iterator[Pipeline]:
    """One that has loaded nothing: none of these calls comes as far as to need weights."""
    with wanrun.load(toy_artifact, lazy=True, embeddings="none") as pipeline:
        yield pipeline


@pytest.mark.parametrize(
    ("options", "expected", "found"),
    [
        ({"prompt": 5}, "string", 5),
        ({"negative_prompt": ["a"]}, "string", '["a"]'),
        ({"seed": True}, "integer", "true"),
        ({"media": "a.png"}, "Media", '"a.png"'),
        ({"media": picture(8, 8)}, "Media", '"Image"'),
        ({"inputs": wanrun.Media()}, "Inputs", '"Media"'),
        ({"timings": []}, "Timings", "[]"),
        ({"on_step": None}, "function", "null"),
        ({"on_step": 5}, "function", 5),
        ({"latents": [[0.0]]}, "NumPy", "[[0.0]]"),
        ({"latents": "noise.npy"}, "NumPy", '"noise.npy"'),
        ({"latents": Tensor()}, "NumPy", '"Tensor"'),
        ({"image": b"a.png"}, "path", '"bytes"'),
        ({"image": picture(8, 8)}, "path", '"Image"'),
        ({"image": 5}, "path", 5),
        ({"reference_image": ("a.png", 5)}, "path", 5),
    ],
)
def test_what_generate_is_given(
    pipeline: Pipeline, options: dict[str, Any], expected: str, found: object
) -> None:
    """Those of the request's rows: test_reading.py."""
    (name,) = options
    error = refused(pipeline.generate, **{"prompt": PROMPT, **options})
    check_type(error, name, expected, found)
    assert name not in ("image", "reference_image") or f"wanrun.Media({name}=" in str(error.remedy)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"prompt": None}, "missing_parameter"),
        ({"seed": 10**5000}, "out_of_range"),
        ({"latents": np.zeros(3)}, "mismatch"),
        ({"size_": "96x64"}, "unknown_parameter"),
    ],
)
def test_what_generate_cannot_use(pipeline: Pipeline, options: dict[str, Any], code: ErrorCode) -> None:
    (name,) = options
    check_refusal(refused(pipeline.generate, **{"prompt": PROMPT, **options}), code, what=name)


def test_what_the_other_calls_are_given(pipeline: Pipeline) -> None:
    latents = np.zeros(pipeline.latents_shape, np.float32)
    check_type(refused(pipeline.encode_prompts, PROMPT), "prompts", "list of strings")
    check_type(refused(pipeline.encode_prompts, [PROMPT], 5), "timings", "Timings", 5)
    check_type(refused(pipeline.warmup, 5), "timings", "Timings", 5)
    check_type(refused(pipeline.decode, "latents"), "latents", "NumPy")
    for bad in (latents[0], latents[..., :-1], latents.astype(np.float64), np.float32(0)):
        error, shape = refused(pipeline.decode, bad), f"{bad.dtype} {bad.shape}"
        check_refusal(error, "mismatch", what="latents", expected=str(latents.shape)[4:], found=shape)


@pytest.fixture(scope="module")
def with_image(toy_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """The same, of a model that takes an image and a video; its programs are the toy's and do not fit."""
    artifact = linked(toy_artifact, tmp_path_factory.mktemp("media") / "artifact")
    make_task(artifact, "animate")
    with wanrun.load(artifact, lazy=True, embeddings="none") as pipeline:
        yield pipeline


@pytest.mark.slow
@pytest.mark.parametrize("value", [b"a.png", 5, {"image": 1}])
def test_media_of_another_type(with_image: Pipeline, value: Any) -> None:
    one, frames = picture(96, 64), [picture(96, 64)] * 9
    given = {"image": one, "pose_video": frames, "face_video": frames}
    cases = [({name: value}, "Pillow image" if name == "image" else "list of images") for name in given]
    cases += [({"face_video": [one, value]}, "Pillow image"), ({"reference_image": value}, "tuple")]
    for other, expected in cases:
        media = wanrun.Media(**{**given, **other})
        check_type(refused(with_image.generate, PROMPT, media=media), *other, expected)


def test_a_file_that_is_not_there(with_image: Pipeline, tmp_path: Path) -> None:
    missing, pose = tmp_path / "none.png", str(tmp_path)
    for image in (missing, str(missing)):
        error = refused(with_image.generate, PROMPT, image=image, pose_video=pose, face_video=pose)
        check_refusal(error, "missing_file", what=missing)
        assert error.fields == ("image",)


def test_values_of_numpy(pipeline: Pipeline) -> None:
    expected = pipeline.resolve(PROMPT, "", seed=7, num_steps=2, guidance_scale=3, size="96x64").options
    numbers = {"seed": np.uint64(7), "num_steps": np.int8(2), "guidance_scale": np.float16(3)}
    for size in ((np.int64(96), np.int64(64)), np.array([96, 64]), [96, 64]):
        found = pipeline.resolve(np.str_(PROMPT), np.str_(""), **numbers, size=size).options
        assert found == expected
        assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


def test_after_close(toy_artifact: Path) -> None:
    with wanrun.load(toy_artifact, lazy=True) as pipeline:
        shape, profile = pipeline.latents_shape, pipeline.profile
    latents = np.zeros(shape, np.float32)
    calls: list[Callable[[], Any]] = [
        lambda: pipeline.generate(PROMPT),
        lambda: pipeline.encode_prompts([PROMPT]),
        lambda: pipeline.decode(latents),
        lambda: pipeline.component_weights("vae"),
        lambda: pipeline.warmup(),
        lambda: pipeline.start([PROMPT]),
        lambda: pipeline.session(profile),
        lambda: pipeline.__enter__(),
    ]
    for call in calls:
        check_refusal(refused(call), "closed", remedy="load")
    pipeline.close()  # once more
