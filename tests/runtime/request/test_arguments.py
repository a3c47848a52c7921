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
from wanrun.artifact.artifact import open_artifact
from wanrun.errors import ArtifactError, UsageError
from wanrun.generation.pipeline import Pipeline
from wanrun.opened.policy import LoadPolicy
from wanrun.request.arguments import array_of, artifact_of, policy_of, texts_of

PROMPT = "a fox in the snow"


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The one line of a call's UsageError."""
    with pytest.raises(UsageError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class NoPath:
    def __fspath__(self) -> bytes:
        return b"artifact"


@pytest.mark.parametrize("artifact", [5, None, b"artifact", ["artifact"], NoPath()])
def test_an_artifact_that_is_no_path(artifact: Any) -> None:
    line = refusal(wanrun.load, artifact)
    assert line.startswith("artifact has the wrong type; expected a path; found ")


@pytest.mark.parametrize("artifact", ["", "a\0b", "\ud800", "a" * 4096])
def test_a_folder_that_cannot_be(artifact: str) -> None:
    assert refusal(wanrun.load, artifact).startswith("artifact is no path; found ")


def test_a_folder(tmp_path: Path) -> None:
    plain_manifest().write(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    artifact = artifact_of(tmp_path / "link")
    assert artifact == artifact_of(str(tmp_path / "link")) and artifact.folder == tmp_path.resolve()
    assert artifact_of(artifact) == artifact == artifact_of(open_artifact(tmp_path / "link"))
    with pytest.raises(ArtifactError, match=r"convert Wan-AI/Wan2.1 "):
        artifact_of("Wan-AI/Wan2.1")


@pytest.mark.parametrize(
    ("name", "expected", "bad"),
    [
        ("size", "(width, height) in pixels", ["96", (96,), (96, 64, 3), (96.0, 64), 96, b"96x64"]),
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
        line = refusal(wanrun.load, "no such artifact", **{name: value})
        assert line.startswith(f"{name} has the wrong type; expected {expected}; found ")


def test_every_choice_has_a_type() -> None:
    for name in LoadPolicy.__struct_fields__:
        line = refusal(wanrun.load, "no such artifact", **{name: object()})
        assert line == f"{name} has the wrong type; expected {line.split('expected ')[1]}"
    assert refusal(wanrun.load, "a", sizes=(96, 64)) == "unknown option 'sizes'; use size"
    assert refusal(wanrun.load, "a", progres=True) == "unknown option 'progres'; use progress"
    assert refusal(wanrun.load, "a", xyz=1).endswith("'xyz'; expected an option that wanrun --help lists")
    for name, fields in {"frames": ("num_frames",), "steps": (), "device": ("target",)}.items():
        with pytest.raises(UsageError) as raised:
            wanrun.load("a", **{name: 1})  # type: ignore[arg-type]
        assert raised.value.fields == fields and raised.value.remedy is not None
    assert "verify cannot be 'md5'" in refusal(wanrun.load, "a", verify="md5")


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
    expected = "prompts has the wrong type; expected a list of strings; found "
    assert refusal(wanrun.load, "no such artifact", prompts=prompts).startswith(expected)
    assert refusal(texts_of, prompts).startswith(expected)


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
    line = refusal(wanrun.load, "no such artifact", **{name: value})
    assert line.startswith(f"{name} has the wrong type; expected {expected}; found ")


@pytest.fixture(scope="module")
def pipeline(toy_artifact: Path) -> Iterator[Pipeline]:
    """One that has loaded nothing: none of these calls comes as far as to need weights."""
    with wanrun.load(toy_artifact, lazy=True, embeddings="none") as pipeline:
        yield pipeline


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"prompt": 5}, "prompt has the wrong type; expected a string; found 5"),
        ({"prompt": b"a"}, 'prompt has the wrong type; expected a string; found "bytes"'),
        ({"prompt": None}, "there is no prompt"),
        ({"negative_prompt": ["a"]}, "negative_prompt has the wrong type; expected a string"),
        ({"seed": "a"}, 'seed has the wrong type; expected an integer; found "a"'),
        ({"seed": 1.0}, "seed has the wrong type; expected an integer; found 1.0"),
        ({"seed": True}, "seed has the wrong type"),
        ({"seed": 10**5000}, "the seed is out of range; expected 0 to 2**64 - 1; found a large int"),
        ({"num_steps": "4"}, "num_steps has the wrong type; expected an integer"),
        ({"guidance_scale": "5"}, "guidance_scale has the wrong type; expected a number"),
        ({"size": 96}, "size has the wrong type"),
        ({"timesteps": 1000.0}, "timesteps has the wrong type; expected a list of numbers"),
        ({"loop": 1}, "loop has the wrong type; expected a string"),
        ({"media": "a.png"}, 'media has the wrong type; expected wanrun\'s Media; found "a.png"'),
        ({"media": picture(8, 8)}, "media has the wrong type; expected wanrun's Media; found "),
        ({"inputs": wanrun.Media()}, "inputs has the wrong type; expected wanrun's Inputs; found "),
        ({"timings": []}, "timings has the wrong type; expected wanrun's Timings; found []"),
        ({"on_step": None}, "on_step has the wrong type; expected a function; found null"),
        ({"on_step": 5}, "on_step has the wrong type; expected a function; found 5"),
        ({"latents": [[0.0]]}, "latents has the wrong type; expected a NumPy array; found [[0.0]]"),
        ({"latents": "noise.npy"}, "latents has the wrong type; expected a NumPy array"),
        ({"latents": np.zeros(3)}, "the initial latents do not fit the profile"),
        ({"image": b"a.png"}, 'image has the wrong type; expected the path of a file; found "bytes"; pass'),
        ({"image": picture(8, 8)}, 'image has the wrong type; expected the path of a file; found "Image"'),
        ({"reference_image": ("a.png", 5)}, "reference_image has the wrong type"),
        (
            {"image": 5},
            "image has the wrong type; expected the path of a file; found 5; pass an object in memory",
        ),
        ({"size_": "96x64"}, "unknown option 'size_'"),
    ],
)
def test_what_generate_is_given(pipeline: Pipeline, options: dict[str, Any], line: str) -> None:
    found = refusal(pipeline.generate, **{"prompt": PROMPT, **options})
    assert found.startswith(line)


def test_what_the_other_calls_are_given(pipeline: Pipeline) -> None:
    latents, wrong = np.zeros(pipeline.latents_shape, np.float32), "has the wrong type; expected"
    assert refusal(pipeline.encode_prompts, PROMPT).startswith(f"prompts {wrong} a list of strings")
    assert refusal(pipeline.encode_prompts, [PROMPT], 5).startswith(f"timings {wrong} wanrun's Timings")
    assert refusal(pipeline.warmup, 5).startswith(f"timings {wrong} wanrun's Timings")
    assert refusal(pipeline.decode, "latents").startswith(f"latents {wrong} a NumPy array")
    for bad in (latents[0], latents[..., :-1], latents.astype(np.float64), np.float32(0)):
        assert refusal(pipeline.decode, bad).startswith("the latents do not fit the profile")


@pytest.fixture(scope="module")
def with_image(toy_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """The same, of a model that takes an image and a video; its programs are the toy's and do not fit."""
    artifact = linked(toy_artifact, tmp_path_factory.mktemp("media") / "artifact")
    make_task(artifact, "animate")
    with wanrun.load(artifact, lazy=True, embeddings="none") as pipeline:
        yield pipeline


@pytest.mark.parametrize("value", [b"a.png", 5, {"image": 1}])
def test_media_of_another_type(with_image: Pipeline, value: Any) -> None:
    one, frames = picture(96, 64), [picture(96, 64)] * 9
    given = {"image": one, "pose_video": frames, "face_video": frames}
    for name in given:
        expected = (
            "a path, a Pillow image or an array"
            if name == "image"
            else "a path, a list of images or an array"
        )
        line = refusal(with_image.generate, PROMPT, media=wanrun.Media(**{**given, name: value}))
        assert line.startswith(f"{name} has the wrong type; expected {expected}; found ")
    line = refusal(with_image.generate, PROMPT, media=wanrun.Media(**{**given, "face_video": [one, value]}))
    assert line.startswith(
        "face_video has the wrong type; expected a path, a Pillow image or an array; found "
    )
    line = refusal(with_image.generate, PROMPT, media=wanrun.Media(**given, reference_image="a.png"))  # type: ignore[arg-type]
    assert line == 'reference_image has the wrong type; expected a tuple of images; found "a.png"'


def test_a_file_that_is_not_there(with_image: Pipeline, tmp_path: Path) -> None:
    missing, pose = tmp_path / "none.png", str(tmp_path)
    for image in (missing, str(missing)):
        line = refusal(with_image.generate, PROMPT, image=image, pose_video=pose, face_video=pose)
        assert line == f"image {missing} cannot be read; found no such file or folder"


def test_arrays() -> None:
    array = np.zeros(3, np.float32)
    assert array_of(array) is array

    class Tensor:
        def __array__(self, *arguments: object, **options: object) -> np.ndarray:
            raise TypeError("it is on another device")

    assert refusal(array_of, Tensor()).startswith(
        "latents has the wrong type; expected a NumPy array; found "
    )


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
        assert refusal(call) == "the pipeline is closed; load the artifact again"
    pipeline.close()  # once more
