"""Fields of requests under every server's names, against manifests alone."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import re
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from PIL import Image
from starlette.datastructures import UploadFile

import wanrun
from helpers.asked import catalog, denies
from helpers.manifests import built_with, plain_manifest, with_profiles
from helpers.options import PROFILE
from helpers.refusals import refuses
from wanbuild.variants.from_video import with_start
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.guiders import NAG_DEFAULTS
from wanrun.errors import ArtifactError, UsageError, WanError
from wanserve.catalog import Catalog, ServedModel
from wanserve.field_names import INSTEAD, api_text
from wanserve.fields import Body, read_body
from wanserve.forms import RequestBody, nested
from wanserve.refusal import RefusedError, refused
from wanserve.request_media import kind_of, safe_name


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 2)).save(file, "PNG")
    return file.getvalue()


DATA = "data:image/png;base64," + base64.b64encode(png()).decode()
VIDEO = b"\0\0\0\x18ftypisom" + bytes(20)


def test_the_form_of_the_loop_is_that_which_is_loaded() -> None:
    """With ``--memory stream``; a profile without it is refused."""
    plain = catalog().models["text"]
    (profile, *_) = plain.manifest.profiles.values()
    built = msgspec.structs.replace(profile, options=msgspec.structs.replace(profile.options, loop="all"))
    model = ServedModel(
        "text", Artifact(with_profiles(plain.manifest, [built]), plain.artifact.folder), "stream"
    )
    assert model.resolve({"prompt": "p"}, str).options["loop"] == "stream"
    with denies("unsupported", param="loop", message="stream"):
        model.resolve({"prompt": "p", "loop": "step"}, str)
    assert "loop" not in model.shown(0)["options"] and len(model.shapes()) == 1
    assert ServedModel("text", plain.artifact, "stream").shapes() == []
    none = Artifact(with_profiles(plain.manifest, []), plain.artifact.folder)
    for artifact in (plain.artifact, none):
        with refuses("not_built", ArtifactError, what="loop stream"):
            Catalog({"text": artifact}, "stream")
    with refuses("not_built", ArtifactError, what="stream"):
        ServedModel("text", plain.artifact, "stream").resolve({"prompt": "p"}, str)


def body(fields: dict[str, Any], model: str = "text", **files: bytes) -> Body:
    """What is read of fields, as JSON gives them, and of files."""
    uploads = [
        (name, UploadFile(io.BytesIO(data), size=len(data), filename=f"{name}.x"))
        for name, data in files.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        return read_body(RequestBody({"prompt": "p", **fields}, uploads), catalog(), Path(folder), model)


HALF = {"name": "style", "strength": -0.5}
OF_EXPERTS = {"name": "style", "high": 1.0, "low": 0.0}


def options(fields: dict[str, Any], model: str = "text") -> dict[str, Any]:
    found = body(fields, model).options
    return {name: value for name, value in found.items() if name != "prompt"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_inference_steps": 20}, {"num_steps": 20}),
        ({"infer_steps": 20}, {"num_steps": 20}),
        ({"num_inference_steps": "20"}, {"num_steps": 20}),  # a form
        ({"num_inference_steps": "20.0"}, {"num_steps": 20}),
        ({"guidance_scale": "3"}, {"guidance_scale": 3.0}),
        ({"width": 96, "height": "64"}, {"size": "96x64"}),
        ({"size": "96x64"}, {"size": "96x64"}),
        ({"seconds": "1"}, {"num_frames": 17}),
        ({"seconds": 5}, {"num_frames": 81}),
        ({"seconds": 5, "num_frames": 81, "fps": 16}, {"num_frames": 81, "fps": 16}),
        ({"seconds": "5", "num_frames": "81"}, {"num_frames": 81}),
        ({"seconds": 1.1}, {"num_frames": 17}),
        ({"seconds": 1.0625}, {"num_frames": 17}),
        ({"seconds": "2", "fps": 8}, {"num_frames": 17, "fps": 8}),
        ({"frame_rate": 8}, {"fps": 8}),
        ({"num_frames": 81, "n": 1}, {"num_frames": 81, "num_videos": 1}),
        ({"seed": [7]}, {"seed": 7}),
        ({"seed": "random"}, {"seed": "random"}),
        ({"seed": "-1"}, {"seed": -1}),
        ({"timesteps": ["900", "500"]}, {"timesteps": (900.0, 500.0)}),
        ({"timesteps": "900,500"}, {"timesteps": (900.0, 500.0)}),
        ({"extra_body": {"num_inference_steps": 4, "seed": 3}}, {"num_steps": 4, "seed": 3}),
        ({"extra_params": '{"flow_shift": 5.0}'}, {"flow_shift": 5.0}),
        ({"extra_body": {"extra_params": {"shift": 5}}}, {"flow_shift": 5}),
        ({"negative_prompt": None, "seed": 1}, {"seed": 1}),
        ({"user": "u1", "max_sequence_length": 512, "response_format": "url"}, {}),
        ({"lora": "style"}, {"lora": [{"name": "style"}]}),
        ({"loras": "style:-0.5"}, {"lora": [HALF]}),
        ({"lora": ["style:high=1,low=0", "b"]}, {"lora": [OF_EXPERTS, {"name": "b"}]}),
        ({"loras": [OF_EXPERTS, HALF]}, {"lora": [OF_EXPERTS, HALF]}),
        ({"loras": '[{"name": "style", "strength": -0.5}]'}, {"lora": [HALF]}),  # a form
        ({"lora": {"name": "style", "strength": "-0.5"}}, {"lora": [HALF]}),
        ({"lora": {"name": "style", "scale": -0.5, "int_id": 7}}, {"lora": [HALF]}),  # vllm-omni
        ({"lora": {"lora_name": "style", "lora_scale": -0.5}}, {"lora": [HALF]}),
        ({"extra_body": {"lora": {"adapter": "style", "scale": -0.5}}}, {"lora": [HALF]}),
        ({"lora_name": "style", "lora_strength": -0.5}, {"lora": [HALF]}),  # LightX2V
        ({"lora_name": "style", "lora_strength": "-0.5"}, {"lora": [HALF]}),
        ({"lora_name": "style", "lora_strength": None}, {"lora": [{"name": "style"}]}),
        ({"lora_nickname": "style"}, {"lora": [{"name": "style"}]}),  # SGLang
        (
            {"lora_nickname": ["style", "b"], "lora_scale": [-0.5, 1]},
            {"lora": [HALF, {"name": "b", "strength": 1}]},
        ),
        ({"lora": None, "lora_name": None, "loras": None}, {}),
        ({"lora": []}, {"lora": []}),
    ],
    ids=str,
)
def test_names(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert options(fields) == expected


def test_clients_are_told_of_fields() -> None:
    """And of nothing that only a command has: flags, what it prints, files of the machine."""
    every = {row.name: api_text(row) for row in wanrun.options()}
    assert "unless `num_steps`," in every["timesteps"] and "for Animate" in every["image"]
    shown = [model.shown(0.0)["fields"] for model in catalog().models.values()]
    own = [field["description"] for fields in shown for field in fields.values()]
    for text in (*every.values(), *own):
        assert not re.search(r"--[a-z]|printed|\.json", text)


def test_the_page_says_what_the_artifact_can_do() -> None:
    text, full = (model.shown(0.0)["fields"] for model in catalog().models.values())
    assert text["loop"]["choices"] == ["step", "scan"] and "stream" not in text["loop"]["description"]
    assert "expert" not in text["guidance_scale"]["description"]
    assert "high-noise expert" in full["guidance_scale"]["description"]
    assert full["image"]["description"] == "The character."
    assert {"guider", "zero_steps", "skip_layers"} & {*text, *full} == {"guider", "zero_steps"}
    assert full["guider"]["choices"] == ["cfg", "cfg-zero"]
    manifest = (artifact := catalog().models["text"].artifact).manifest
    unguided = [
        msgspec.structs.replace(one, options=msgspec.structs.replace(one.options, guiders=()))
        for one in manifest.profiles.values()
    ]
    assert (
        "guider"
        not in ServedModel("text", Artifact(with_profiles(manifest, unguided), artifact.folder)).options
    )
    assert "CFG-Zero" in full["guider"]["description"] and "skip" not in full["guider"]["description"]
    assert "strength" not in text and "video" not in text
    assert {"window_frames", "window_overlap"} & {*full} == set() != {"window_frames"} & {*text}
    plain = catalog().models["text"]
    started = plain.manifest.changed(**with_start(plain.manifest, built=True))
    shown = ServedModel("text", Artifact(started, plain.artifact.folder)).shown(0.0)
    assert {"strength", "video", "fit"} <= shown["fields"].keys()
    assert [(one["name"], one["kind"], one["required"]) for one in shown["inputs"]] == [
        ("video", "video", False)
    ]
    assert "to begin with" in shown["inputs"][0]["description"]
    assert (full["fit"]["choices"], full["fit"]["default"]) == (["stretch", "crop", "pad"], "stretch")


def test_clients_are_told_what_a_client_can_do() -> None:
    """Of another tool's name: no command, and no option that a request has not."""
    for remedy in INSTEAD.values():
        assert not re.search(r"wan(run|build)|docs/|--[a-z]", remedy)
        assert set(UsageError("invalid_value", "", remedy=remedy).fields) <= {
            row.name for row in wanrun.options()
        }


def test_options_of_two_experts() -> None:
    fields = {"guidance_scale": 4.0, "guidance_scale_2": 3.0, "boundary_ratio": 0.9}
    assert options(fields, "full") == {"guidance_scale": 4.0, "guidance_scale_2": 3.0, "boundary": 0.9}


@pytest.mark.parametrize(
    ("fields", "param", "line"),
    [
        ({"stepz": 3}, "stepz", "unknown field 'stepz'; use steps"),
        ({"teacache": 0.2}, "teacache", "unknown field 'teacache'; pass schedule"),
        ({"offload_model": True}, "offload_model", "unknown field 'offload_model'; leave it out"),
        ({"torch_dtype": "bf16"}, "torch_dtype", "unknown field 'torch_dtype'; an artifact is made"),
        ({"foo": 3}, "foo", "unknown field 'foo'; expected an option that v1/models/text lists"),
        ({"nag": 5}, "nag", "unknown field 'nag'; use nag_scale"),
        ({"clip": 2}, "clip", "unknown field 'clip'; expected an option that v1/models/text lists"),
        ({"steps": 3, "num_inference_steps": 3}, "num_inference_steps", "is given twice, also as steps"),
        ({"steps": 3, "extra_body": {"steps": 3}}, "steps", "steps is given twice"),
        ({"extra_body": "[1"}, "extra_body", "extra_body is not JSON"),
        ({"extra_body": [1]}, "extra_body", "expected an object; found"),
        ({"width": 96}, "height", "height is missing"),
        ({"width": "x", "height": 64}, "width", "width cannot be x; expected 1 to 99999"),
        ({"width": 96, "height": 64, "size": "96x64"}, "size", "given twice"),
        (
            {"seconds": 4},
            "seconds",
            "no video of 4 seconds is built; expected one of 1.062 (17 frames), 5.062",
        ),
        ({"seconds": "soon"}, "seconds", "expected a positive number"),
        ({"seconds": 4, "num_frames": 81}, "seconds", "seconds and num_frames contradict each other"),
        ({"seconds": 4, "num_frames": "9" * 39}, "seconds", "seconds and num_frames contradict each other"),
        ({"max_sequence_length": 226}, "max_sequence_length", "cannot be 226; expected 512"),
        ({"lora": "style:x"}, "lora", "is not understood"),
        ({"lora": 3}, "lora", "lora has the wrong type; expected the name of a LoRA"),
        ({"lora": [["style"]]}, "lora", "lora has the wrong type"),
        ({"lora": "[1"}, "lora", "lora is not JSON"),
        ({"lora": {"name": "a", "path": "/etc/a"}}, "lora", "no path of the server is read"),
        ({"lora": {"name": "a", "lora_path": "/etc/a"}}, "lora", "no path of the server is read"),
        ({"loras": {"name": "a", "scale": 1, "strength": 2}}, "loras", "given twice, also as 'strength'"),
        ({"lora": "a", "lora_name": "a"}, "lora_name", "given twice, also as lora"),
        ({"lora_strength": 1}, "lora_strength", "without lora_name"),
        ({"lora_name": ["a", "b"], "lora_strength": 1}, "lora_name", "different lengths"),
        ({"lora_path": "/etc/a"}, "lora_path", "no path of the server is read"),
        ({"lora_dir": "/etc"}, "lora_dir", "unknown field 'lora_dir'"),
        ({"output_path": "/tmp/x.mp4"}, "output_path", "no path of the server is read or written"),
        ({"video_path": "/etc/passwd"}, "video_path", "no path of the server is read"),
        ({"format": "exe"}, "format", "expected one of mp4, webm"),
        ({"model": "sora-2"}, "model", "there is no model 'sora-2'; expected one of text, full"),
        ({"model": 3}, "model", "model has the wrong type"),
        ({"image": DATA}, "image", "image cannot be used: text takes no images or videos"),
        ({"steps": ["1", "2"]}, "steps", "steps is given 2 times"),
        ({"prompt": ["a", "b"]}, "prompt", "send a request for each"),
        ({"size": "480p"}, "size", "expected one of 96x64, 64x96"),
        ({"stream": True}, "stream", "v1/videos/ID/events"),
        ({"response_format": "b64_json"}, "response_format", "v1/videos/ID/content"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_refused(fields: dict[str, Any], param: str, line: str) -> None:
    with pytest.raises(RefusedError) as caught:
        body(fields)
    assert caught.value.param == param
    told = caught.value.body["error"]
    assert line in told["message"]
    for name in ("expected", "found"):
        assert (f"; {name} " in told["message"]) == (name in told)


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"input_reference": DATA}, ["image"]),
        ({"input_reference": {"image_url": DATA}}, ["image"]),
        ({"input_reference": {"image_url": {"url": DATA}}}, ["image"]),
        ({"image_reference": DATA.partition(",")[2] + "A" * 400}, ["image"]),
        ({"image_reference": f'[{{"image_url": "{DATA}", "role": "first_frame"}}]'}, ["image"]),
        ({"image": DATA, "video_reference": DATA}, ["image", "video"]),
        ({"first_frame": DATA}, ["image"]),
        ({"image": ""}, []),
    ],
    ids=lambda value: str(value)[:40],
)
def test_images_in_fields(fields: dict[str, Any], given: list[str]) -> None:
    if "A" * 400 in str(fields):  # base64 of any length
        fields = {"image_reference": base64.b64encode(png() + bytes(400)).decode()}
    assert [one.option for one in body(fields, "full").media] == given


def test_what_a_long_text_becomes_is_bounded() -> None:
    """Base64 in lines, parameters of a data: URL, and numbers: no object for each of their parts."""
    png_url, many = "data:image/png;base64,", 100_000
    digest = hashlib.sha256(bytes(many // 2 * 3)).hexdigest()
    texts = {"image": png_url + "AA\r\n" * many, "mask": f"data:{';a=' * many}", "timesteps": "11," * many}
    for name, text in texts.items():
        tracemalloc.start()
        with contextlib.suppress(RefusedError):
            found = body({name: text}, "full")
            assert name == "timesteps" or found.media[0].digest == digest
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 * len(text), name


def test_files() -> None:
    found = body({}, "full", input_reference=png(), mask=VIDEO).media
    assert [one.option for one in found] == ["image", "mask"]
    found = body({}, "full", input_reference=VIDEO).media
    assert [one.option for one in found] == ["video"]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("http://example.com/a.png", "is a URL, and URLs are not fetched"),
        ("file:///etc/passwd", "is a URL, and URLs are not fetched"),
        ("/etc/passwd", "is no file, and no path is read"),
        ("../../key", "is no file, and no path is read"),
        ("data:image/png,abc", "without base64"),
        ("data:image/png;base64,###", "is not valid base64"),
        ("data:image/png;base64,AA==AA==", "is not valid base64"),
        (f"data:{';a=' * 1000}", "is a URL"),
        ("data:image/png;base64,", "is an empty file"),
        ({"file_id": "file-1"}, "names a stored file"),
        ({"role": "middle", "image_url": DATA}, 'has the role "middle"'),
        ({"role": {}, "image_url": DATA}, "has the role an object"),
        ({"x": 1}, "has no image_url"),
        (7, "has the wrong type"),
    ],
    ids=str,
)
def test_images_that_are_refused(value: Any, line: str) -> None:
    with pytest.raises(RefusedError, match="image") as caught:
        body({"image": value}, "full")
    assert line in str(caught.value)
    assert "/etc" not in caught.value.body["error"]["message"]


def test_one_image_is_one_image() -> None:
    with denies("conflict", message="image ", param="input_reference"):
        body({"image": DATA, "input_reference": DATA}, "full")
    with denies("unknown_parameter", param="steps", message=" image, "):
        body({}, "full", steps=png())
    with denies("unsupported", param="last_image", message=("full", "image, video, mask")):
        body({}, "full", last_image=png())
    with denies("invalid_value", param="image"):
        body({}, "full", image=b"")


def test_the_artifact_decides() -> None:
    """What is built is told by the record's own line, under the client's names, and nothing is loaded."""
    model = catalog().models["text"]
    found = body({"num_inference_steps": "many"})
    with refuses("wrong_type", expected="integer") as caught:
        model.resolve(found.options, found.spell)
    assert caught.value.spelled(found.spell).startswith("num_inference_steps ")
    for name, shown in (("a.json", "'a.json'"), ("1" * 1000, f"'{'1' * 60}'")):
        with denies("unknown_name", param="preset", message=(shown, "none")):
            model.resolve({"prompt": "p", "schedule": name}, lambda name: "preset")
    with refuses("wrong_type", what="schedule", expected="string"):
        model.resolve({"prompt": "p", "schedule": {"a": 1}}, str)
    assert model.resolve({"prompt": "p", "num_frames": 81}, str).profile.name == "96x64x81-b1-cfg"
    windows = {"prompt": "p", "num_frames": 33, "window_frames": 17}
    assert model.resolve(windows, str).counts().windows == 3
    for wrong in ({"num_frames": 34}, {"window_frames": 16}, {"window_overlap": 3}):
        with pytest.raises(WanError) as refused:
            model.resolve({**windows, **wrong}, str)
        assert {*wrong} <= {*refused.value.fields}


def test_models_are_shown() -> None:
    text, full = (model.shown(0.0) for model in catalog().models.values())
    assert [shape["profile"] for shape in text["shapes"]] == [
        "96x64x17-b1-cfg",
        "96x64x81-b1-cfg",
        "64x96x17-b2-nocfg",
    ]
    assert text["inputs"] == [] and text["presets"] == []
    assert not {"boundary", "steps_high", "image", "mode", "segment_overlap", "conditioning_scale"} & set(
        text["options"]
    )
    assert [item["name"] for item in full["inputs"]] == ["image", "video", "mask"]
    assert [item["required"] for item in full["inputs"]] == [True, True, False]
    assert {"boundary", "steps_high", "image", "mode", "segment_overlap"} <= set(full["options"])
    assert full["presets"][0]["name"] == "2-steps"
    msgspec.json.encode(full)


def test_a_form_nests() -> None:
    texts = [
        ("a", "1"),
        ("extra_body[seed]", "2"),
        ("extra_body[x][y]", "3"),
        ("t[]", "4"),
        ("t[]", "5"),
        ("u[]", "6"),
    ]
    assert nested(texts) == {
        "a": "1",
        "extra_body": {"seed": "2", "x": {"y": "3"}},
        "t": ["4", "5"],
        "u": ["6"],
    }
    with denies("invalid_value", param="loras", message="JSON"):
        nested([("loras[][name]", "a")])
    with denies("conflict", param="a"):
        nested([("a", "1"), ("a[b]", "2")])
    with denies("too_deep"):
        nested([("a" + "[b]" * 9, "1")])
    with denies("unknown_parameter", message="'[a'"):
        nested([("[a", "1")])


@pytest.mark.parametrize(
    ("given", "code", "value"),
    [
        ({"name": "stile"}, "unknown_name", " style (v1/loras)"),
        ({"name": "big"}, "unknown_name", " style "),  # which has a rank that no profile has slots for
        ({"name": "/etc/passwd"}, "unknown_name", " style "),
        ({"name": "style", "strength": "much"}, "invalid_value", "`$.strength`"),
        ({"name": "style", "force": 1}, "invalid_value", "`force`"),
        ({"name": 3}, "invalid_value", "`$.name`"),
        ({"name": "style", "high": 1, "low": 0}, "mismatch", "one strength"),
    ],
    ids=str,
)
def test_a_lora_that_a_model_has_not(given: dict[str, Any], code: str, value: str) -> None:
    """And no name is looked for on the machine."""
    with pytest.raises((RefusedError, UsageError)) as caught:
        found = body({"loras": [given]})
        found.model.resolve(found.options, found.spell)
    error = caught.value
    told = error if isinstance(error, RefusedError) else refused(error, found.spell)
    message = told.body["error"]["message"]
    assert (told.param, told.code) == ("loras", code) and value in message
    assert "wanbuild" not in message and "FILE" not in message


def test_the_loras_of_a_model() -> None:
    models = catalog().models
    (style,) = models["text"].shown(0)["loras"]
    assert style == {"name": "style", "rank": 16, "experts": [], "defaults": {}, "sha256": "0"}
    (style,) = models["full"].shown(0)["loras"]
    assert style["experts"] == ["high"] and style["defaults"]["num_steps"] == 2
    assert "lora" in models["text"].options and models["text"].shapes()[0]["lora_rank"] == 32
    generation = models["text"].resolve({"prompt": "p", "lora": [HALF]}, str)
    assert generation.options["lora"][0]["strengths"] == {"transformer": -0.5}
    none = models["text"].artifact.changed(adapters={})
    assert "lora" not in ServedModel("text", none).options
    with denies("unknown_name", param="lora", message="none"):
        ServedModel("text", none).resolve({"prompt": "p", "lora": [HALF]}, str)


@pytest.mark.parametrize("nag", [False, True])
def test_nag_is_offered_where_a_profile_is_built_for_it(nag: bool) -> None:
    profile = structs.replace(PROFILE, options=built_with(nag=nag))
    model = ServedModel("a", Artifact(plain_manifest(profiles={profile.name: profile}), Path("a")))
    assert (NAG_DEFAULTS.keys() <= model.options.keys()) == nag


def test_kinds_and_names() -> None:
    assert kind_of(b"\x89PNG....") == (".png", "image")
    assert kind_of(b"RIFF....WEBP") == (".webp", "image")
    assert kind_of(b"RIFF....AVI ") == (".avi", "video")
    assert kind_of(b"\0\0\0\x18ftypisom") == (".mp4", "video")
    assert kind_of(b"\0\0\0\x18ftypavif") == (".avif", "image")
    assert kind_of(b"\0\0\0\x18ftypheic") == (".heic", "image")
    assert kind_of(b"hello") == (".bin", "video")
    assert [safe_name(name) for name in ("../../a.png", "C:\\x\\b.png", "a\nb", "", None)] == [
        "a.png",
        "b.png",
        "ab",
        "file",
        "file",
    ]
