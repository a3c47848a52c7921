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
    with refuses("wrong_kind", ArtifactError, remedy="convert Wan-AI/Wan2.1 "):
        artifact_of("Wan-AI/Wan2.1")


@pytest.mark.parametrize(
    ("name", "expected", "bad"),
    [
        ("size", "(width, height)", ["96", (96,), (96, 64, 3), (96.0, 64), 96, b"96x64"]),
        ("num_frames", "an integer", ["9", 9.0, True, b"9", [9], "\ud800"]),
        ("num_videos", "an integer", ["1", 1.5, None]),
        ("num_references", "an integer", [(), "0"]),
        ("guidance", "True or False", [1, "yes", 5.0]),
        ("allow_compile", "True or False", [0, "no", None]),
        ("lazy", "True or False", [np.int64(1)]),
        ("target", "a string", [5, b"cpu"]),
        ("verify", "a string", [True, None]),
        ("memory", "a string", [64]),
        ("loop", "a string", [1, ("step",)]),
        ("first_expert", "a string", [0]),
        ("text_encoder_device", "a string", [0, object()]),
        ("embeddings", "a string", [["all"]]),
        ("weights", "a string", [5, b"weights"]),
    ],
)
def test_choices_of_another_type(name: str, expected: str, bad: list[Any]) -> None:
    """Whatever the artifact: it is not looked at."""
    for value in bad:
        check_type(refused(wanrun.load, "no such artifact", **{name: value}), name, expected)


def test_every_choice_has_a_type() -> None:
    for name in LoadPolicy.__struct_fields__:
        error = refused(wanrun.load, "no such artifact", **{name: object()})
        check_type(error, name, "", '"object"')
        assert error.expected
    check_refusal(refused(wanrun.load, "a", verify="md5"), "invalid_value", what="'md5'", expected="sha256")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sizes", ("size",)),
        ("progres", ("progress",)),
        ("frames", ("num_frames",)),
        ("steps", ()),
        ("device", ("target",)),
    ],
)
def test_choices_that_there_are_not(name: str, fields: tuple[str, ...]) -> None:
    error = refused(wanrun.load, "a", **{name: 1})
    check_refusal(error, "unknown_parameter", what=repr(name))
    assert error.fields == fields and error.remedy
    check_refusal(refused(wanrun.load, "a", xyz=1), "unknown_parameter", what="'xyz'", expected="--help")


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
    assert policy_of({"size": [np.int64(96), 64]}) == LoadPolicy(size=(96, 64))
    assert policy_of({"size": "96x64"}) == policy_of({"size": "96*64"}) == LoadPolicy(size=(96, 64))
    assert policy_of({"size": None, "num_frames": None, "guidance": None, "target": None}) == LoadPolicy()


@pytest.mark.parametrize("prompts", [PROMPT, b"a fox", [PROMPT, 5], [b"a fox"], 5, {PROMPT}, [None]])
def test_prompts_that_are_no_list_of_texts(prompts: Any) -> None:
    for error in (refused(wanrun.load, "no such artifact", prompts=prompts), refused(texts_of, prompts)):
        check_type(error, "prompts", "list of strings")


def test_prompts() -> None:
    for prompts in ([PROMPT, ""], (PROMPT, ""), np.array([PROMPT, ""])):
        assert texts_of(prompts) == [PROMPT, ""]


@pytest.mark.parametrize(
    ("name", "expected", "value"),
    [
        ("inputs", "wanrun's Inputs", {}),
        ("timings", "wanrun's Timings", True),
        ("warn", "a function", None),
        ("report", "a function", "print"),
    ],
)
def test_objects_that_load_is_given(name: str, expected: str, value: Any) -> None:
    check_type(refused(wanrun.load, "no such artifact", **{name: value}), name, expected)


@pytest.fixture(scope="module")
def pipeline(toy_artifact: Path) -> Iterator[Pipeline]:
    """One that has loaded nothing: none of these calls comes as far as to need weights."""
    with wanrun.load(toy_artifact, lazy=True, embeddings="none") as pipeline:
        yield pipeline


@pytest.mark.parametrize(
    ("options", "expected", "found"),
    [
        ({"prompt": 5}, "string", 5),
        ({"prompt": b"a"}, "string", '"bytes"'),
        ({"negative_prompt": ["a"]}, "string", '["a"]'),
        ({"seed": "a"}, "integer", '"a"'),
        ({"seed": 1.0}, "integer", 1.0),
        ({"seed": True}, "integer", "true"),
        ({"num_steps": "4"}, "integer", '"4"'),
        ({"guidance_scale": "5"}, "number", '"5"'),
        ({"size": 96}, "string", 96),
        ({"timesteps": 1000.0}, "list of numbers", 1000.0),
        ({"loop": 1}, "string", 1),
        ({"media": "a.png"}, "Media", '"a.png"'),
        ({"media": picture(8, 8)}, "Media", '"Image"'),
        ({"inputs": wanrun.Media()}, "Inputs", '"Media"'),
        ({"timings": []}, "Timings", "[]"),
        ({"on_step": None}, "function", "null"),
        ({"on_step": 5}, "function", 5),
        ({"latents": [[0.0]]}, "NumPy", "[[0.0]]"),
        ({"latents": "noise.npy"}, "NumPy", '"noise.npy"'),
        ({"image": b"a.png"}, "path", '"bytes"'),
        ({"image": picture(8, 8)}, "path", '"Image"'),
        ({"image": 5}, "path", 5),
        ({"reference_image": ("a.png", 5)}, "path", 5),
    ],
)
def test_what_generate_is_given(
    pipeline: Pipeline, options: dict[str, Any], expected: str, found: object
) -> None:
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
    for name in given:
        expected = "Pillow image" if name == "image" else "list of images"
        media = wanrun.Media(**{**given, name: value})
        check_type(refused(with_image.generate, PROMPT, media=media), name, expected)
    media = wanrun.Media(**{**given, "face_video": [one, value]})
    check_type(refused(with_image.generate, PROMPT, media=media), "face_video", "Pillow image")
    media = wanrun.Media(**given, reference_image="a.png")  # type: ignore[arg-type]
    check_type(refused(with_image.generate, PROMPT, media=media), "reference_image", "tuple", '"a.png"')


def test_a_file_that_is_not_there(with_image: Pipeline, tmp_path: Path) -> None:
    missing, pose = tmp_path / "none.png", str(tmp_path)
    for image in (missing, str(missing)):
        error = refused(with_image.generate, PROMPT, image=image, pose_video=pose, face_video=pose)
        check_refusal(error, "missing_file", what=missing)
        assert error.fields == ("image",)


def test_arrays() -> None:
    array = np.zeros(3, np.float32)
    assert array_of(array) is array

    class Tensor:
        def __array__(self, *arguments: object, **options: object) -> np.ndarray:
            raise TypeError("it is on another device")

    check_type(refused(array_of, Tensor()), "latents", "NumPy", '"Tensor"')


@pytest.mark.slow
def test_numbers_of_numpy_make_the_same_video(toy_artifact: Path) -> None:
    sizes = ((np.int64(96), np.int64(64)), np.array([96, 64]), [96, 64])
    with wanrun.load(toy_artifact, size=np.array([96, 64]), num_frames=np.int64(9)) as pipeline:
        expected = pipeline.generate(PROMPT, "", seed=7, num_steps=2, guidance_scale=3, size="96x64")
        for size in sizes:
            found = pipeline.generate(
                np.str_(PROMPT),
                np.str_(""),
                seed=np.uint64(7),
                num_steps=np.int8(2),
                guidance_scale=np.float16(3),
                size=size,
            )
            assert found.options == expected.options and np.array_equal(found.latents, expected.latents)
            assert all(type(value) is not np.str_ for value in found.options.values())


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
