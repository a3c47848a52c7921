"""The records of a manifest: what they compute, and which values none of them takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.manifests import ENVIRONMENT as REQUIRED
from helpers.manifests import (
    built_with,
    full_manifest,
    plain_adapter,
    plain_manifest,
    plain_model,
    plain_program,
    program_set,
)
from helpers.media_files import CLIP, task_of
from helpers.refusals import refuses
from wanrun.artifact.adapter import Lora, SamplingDefaults
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.layout import ArrayLayout
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.model import Chunking
from wanrun.artifact.parameters import Component, Parameter
from wanrun.artifact.programs import Kernels, Profile, aval
from wanrun.artifact.schedules import Schedule
from wanrun.errors import ArtifactError

FULL = full_manifest().as_json()
"""Every field of every record has a value."""

(PROFILE,), (SET,) = FULL["profiles"], FULL["program_sets"]
STEP = f"program_sets/{SET}/programs/{PROFILE}/denoise_step"
ATTENTION = f"program_sets/{SET}/programs/{PROFILE}/attention"
EXECUTABLE = f"targets/cpu/executables/{PROFILE}/denoise_step"
ENVIRONMENT = "targets/cpu/environment"
PARAMETER = "components/vae/parameters/w"
STYLE = msgspec.to_builtins(plain_adapter("style"))
STATE = {"inputs": {"x": "float32[]"}, "outputs": {"x": "float32[]"}}


def layout(shape: Any = (4, 4), dtype: str = "float32", rows: Any = 1, chunks: Any = 1) -> dict[str, Any]:
    return {"shape": shape, "dtype": dtype, "rows": rows, "chunks": chunks}


def program(**fields: Any) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(
        plain_program(role="step", inputs=("x",), donate=(0,), avals=STATE)
    )
    avals: dict[str, Any] = {**plain["avals"], **fields.pop("avals", {})}
    return {**plain, "avals": avals, **fields}


BAD: Mapping[str, list[Any]] = {
    "model/vae_spatial": [0],
    "model/leading_latents": [-1],
    "model/text_width": ["32"],
    "model/task": [None],
    "model/num_train_timesteps": [1, 10**30, 2**63, 1000.0, True],
    "model/latent_channels": [2**21],
    "model/size_multiple": [10**30],
    "model/colour": ["red"],
    "model/defaults/num_steps": [0, 10_001, 10**30],
    "model/defaults/flow_shift": [0, -1.5, 0.0, 1e300],
    "model/defaults/fps": [0, 0.0, 241, 1e300],
    "model/defaults/guidance_scale": [10**30, 1e300, "4"],
    "model/defaults/solver": ["", "UniPC", None],
    "model/defaults/timesteps": [[], [0], [-1.0], [10**30], ["900"]],
    "model/options/boundary": [-0.5, 1.5, True, 10**30, "0.5"],
    "model/options/guidance_scale_2": [1e300, "3"],
    "model/options/conditioning_scale": [10**60],
    "model/options/no_such_option": [1.0],
    "model/options/": [1],
    "model/image_processor/shortest_edge": [4097],
    "model/image_processor/crop": [10**30],
    "model/image_processor/resample": [6],
    "model/image_processor/rescale_factor": [0, 1e-300, 1e300],
    "model/image_processor/std": [[0, 1, 1], [1.0, 0.0, 1.0]],
    "model/image_processor/mean": [[0, 0, 10**30], [0.5, 0.5]],
    "dtypes/vae/weights": ["float64"],
    PARAMETER: [None, {}],
    f"{PARAMETER}/layout/shape": [[], [0], [-3], [3.0], ["3"], None],
    f"{PARAMETER}/layout/dtype": ["object", "float64", []],
    f"{PARAMETER}/layout/rows": [2, 0, "1", True, 1.0],
    f"{PARAMETER}/layout/chunks": [5, 0],
    f"{PARAMETER}/layout": [
        *(layout(()), layout((0, 4)), layout((4, -1)), layout((4.0, 4), rows=2, chunks=2)),
        *(layout(rows=3), layout(rows=4, chunks=3), layout(rows=4, chunks=0), layout(rows=2, chunks=4)),
    ],
    f"{PARAMETER}/crc32c": [[], ["00000000", "11111111"], 3],
    f"{PARAMETER}/axes": [[], [None], [None, None, None], [7, None]],
    # Both cannot be in one tree.
    "components/vae/parameters": [
        dict.fromkeys(("a/c/d", "a/c"), FULL["components"]["vae"]["parameters"]["w"])
    ],
    f"profiles/{PROFILE}/num_references": [-1, 1.0, "2", None, True, [2], 3],
    STEP: [
        program(inputs=["x", "x"]),
        program(donate=[1]),
        program(donate=[0, 0]),
        program(donate=[]),
        *(
            program(avals={"inputs": {"x": text}})
            for text in ("float32", "float32[2,3", "float32[-1]", "int33[2]")
        ),
        program(avals={"outputs": {"x": {"y": 3}}}),
        *(program(avals=avals) for avals in ({"inputs": []}, {"others": {}}, {"outputs": {}})),
        program(role="scan", avals={"inputs": {}}),
    ],
    f"{STEP}/role": ["no such role"],
    f"{STEP}/plain": [{"file": "p", "sha256": "0"}],
    f"{ATTENTION}/plain": [None],
    ENVIRONMENT: [{name: REQUIRED[name] for name in REQUIRED if name != fact} for fact in REQUIRED],
    **{f"{ENVIRONMENT}/{fact}": [[]] for fact in REQUIRED},
    f"{ENVIRONMENT}/topology": [3],
    f"{ENVIRONMENT}/device_kinds": ["cpu"],
    f"{EXECUTABLE}/bytes": [-1],
    "embeddings": [[], {"e": None}],
    "embeddings/e": [
        {name: value for name, value in FULL["embeddings"]["e"].items() if name != left_out}
        for left_out in FULL["embeddings"]["e"]
    ],
    "embeddings/e/sha256": [None],
    "embeddings/e/prompt": [7],
    "embeddings/e/dtype": ["object", ["float32"]],
    "embeddings/e/length": [0, True, "3"],
    "schedules/2-steps/solver": ["no-such"],
    "schedules/2-steps/timesteps": [[], [0]],
    "schedules/2-steps/boundary": [2],
    "schedules/2-steps/steps": [3],
    "adapters/style/content/format": [2],
    "adapters/style/content/rank": [-1],
    "adapters/style/content/experts": [[], ["vae"]],
    "adapters/style/content/loras": [[]],
    "adapters/style/content/options": [{"solver": "no-such"}, {"timesteps": []}, {"boundary": 2}, {"fps": 0}],
    # Names that no option could give.
    "adapters": [
        {name: STYLE} for name in ("", "a:0.5", "a,b", "a=b", "../a", ".a", "a/b", "a b", "a\n", "a" * 101)
    ],
    "loras": [[{"file": "a"}], [{"file": "a", "sha256": "0", "scale": "1", "component": None}]],
}
"""Values by their place, of which each ends in one error."""


def changed(place: str, value: Any) -> dict[str, Any]:
    """The manifest with a value at a place."""
    *parts, last = place.split("/")
    data = node = dict(FULL)
    for part in parts:
        node[part] = node = dict(node[part])
    node[last] = value
    return data


REFUSALS = [(place, value) for place, values in BAD.items() for value in values]


@pytest.mark.parametrize(("place", "value"), REFUSALS)
def test_a_value_that_makes_no_sense_is_refused(place: str, value: Any) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(changed(place, value), Manifest)
    found = re.search(r"`\$\.(\w+)", str(caught.value))
    assert found is None or found[1] in place.split("/")


@pytest.mark.parametrize(
    "place",
    [
        *(
            "tokenizer/file",
            f"{STEP}/file",
            f"{ATTENTION}/plain/file",
            "targets/cpu/folder",
            f"{EXECUTABLE}/file",
        ),
        *(
            "targets/cpu/requirements/file",
            f"golden/{PROFILE}/file",
            "embeddings/e/file",
            "verdicts/facts/file",
        ),
        *("adapters/style/file", "components/vae/folder", "components/vae/parameters", "components"),
    ],
)
def test_a_name_that_leads_outside_is_refused(place: str) -> None:
    """Which names are, ``tests/runtime/test_files.py`` has."""
    last = FULL[place] if place == "components" else FULL["components"]["vae"]["parameters"]
    value = "../x" if place.endswith(("file", "folder")) else {**last, "../x": next(iter(last.values()))}
    with refuses("untrusted", ArtifactError, found="'../x'"):
        msgspec.convert(changed(place, value), Manifest)


def test_a_record_is_what_its_json_says() -> None:
    """Digests cover it: a number that was written whole stays whole."""
    assert msgspec.convert(FULL, Manifest) == full_manifest()
    assert b'"bytes":3' in msgspec.json.encode(full_manifest().targets["cpu"])
    with pytest.raises(AttributeError):
        full_manifest().format = ""  # type: ignore[misc]
    for text in (
        b'{"file":"a.safetensors","sha256":"0","scale":-2,"component":null}',
        b'{"file":"a.safetensors","sha256":"0","scale":0.5,"component":"transformer_2","left_out":7}',
    ):
        assert msgspec.json.encode(msgspec.json.decode(text, type=Lora)) == text
    environment = {
        **FULL["targets"]["cpu"]["environment"],
        "topology": "1",
        "device_kinds": ["cpu"],
        "other": 1,
    }
    assert (
        msgspec.convert(changed(ENVIRONMENT, environment), Manifest).targets["cpu"].environment["other"] == 1
    )


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        *(
            (name, False) for name in ("adapters", "schedules", "preview", "verdicts")
        ),  # they make no other video
        *((name, False) for name in ("times", "targets", "golden")),
        *((name, True) for name in ("profiles", "dtypes", "loras")),
    ],
)
def test_what_a_digest_covers(fields: str, content: bool) -> None:
    """Records that came later leave no trace where they are empty: digests stay as they were before."""
    full = full_manifest()
    rest = ("program_sets", "targets", "golden", "verdicts") if fields == "profiles" else ()
    empty = {name: type(getattr(full, name))() for name in (fields, *rest)}
    less = full.changed(**empty)
    assert (less.content_digest != full.content_digest) == content
    assert less.manifest_digest != full.manifest_digest
    assert (fields in less.as_json()) == (fields not in ("adapters", "schedules", "preview", "verdicts"))
    assert msgspec.convert(less.as_json(), Manifest) == less


def test_options_and_fields_that_came_later_leave_no_trace_either() -> None:
    full = full_manifest()
    ((key, programs),) = full.program_sets.items()
    new = full.changed(program_sets={key: msgspec.structs.replace(programs, exported={})})
    assert full.content_digest == new.content_digest and full.manifest_digest != new.manifest_digest
    assert "exported" not in new.as_json()["program_sets"][key]
    plain = msgspec.structs.replace(full.profiles[PROFILE], options=built_with(), num_references=0)
    less = plain_manifest(profiles={plain.name: plain}).as_json()
    assert not {"lora_rank", "vae_tile", "nag"} & less["profiles"][plain.name]["options"].keys()
    assert not {"flow_map", "chunks"} & less["model"].keys() and "start" not in less["model"]["task"]
    assert "plain" not in FULL["program_sets"][SET]["programs"][PROFILE]["denoise_step"]
    names = [one.name for one in Artifact(full, Path()).named()]
    assert names.count("programs/a-plain") == names.count("programs/a") == 1


# --- what they compute ---


def test_the_defaults_of_a_model() -> None:
    model = plain_model()
    assert model.default_options() == {
        "num_steps": 40,
        "guidance_scale": 4.0,
        "flow_shift": 12.0,
        "solver": "unipc",
        "fps": 16,
        "negative_prompt": "blurry",
    }
    distilled = msgspec.structs.replace(model.defaults, timesteps=(1000, 500.5))
    assert plain_model(defaults=distilled).default_options()["timesteps"] == (1000, 500.5)
    own = {"guidance_scale_2": 3.0, "boundary": 0.875}
    assert plain_model(options=own).default_options().items() >= own.items()
    animate = plain_model(task=task_of("wan2.2-animate"), image_processor=CLIP)
    assert animate.default_options()["segment_overlap"] == 1


def test_the_lengths_of_chunks() -> None:
    chunks = Chunking(first=1, each=3)
    assert [chunks.lengths(frames) for frames in (1, 4, 6)] == [(1,), (1, 3), (1, 3, 2)]
    assert chunks.lengths(6, 5) == (1, 3, 3) and chunks.lengths(6, 9) == (1, 3, 2)
    assert chunks.lengths(5, 4) == (1, 3, 1) and Chunking(first=3, each=3).lengths(2, 6) == (3,)
    assert [chunks.within(frames) for frames in (0, 1, 3, 4, 7)] == [0, 1, 1, 2, 3]


def test_how_records_are_described() -> None:
    lora = Lora(file="a.safetensors", sha256="0", scale=0.5, component="transformer_2", left_out=7)
    assert all(part in str(lora) for part in ("a.safetensors", "0.5", "transformer_2"))
    assert lora.facts == {"file": "a.safetensors", "scale": 0.5, "sha256": "0", "component": "transformer_2"}
    assert SamplingDefaults().given == {}
    assert SamplingDefaults(num_steps=4, guidance_scale=0).given == {"num_steps": 4, "guidance_scale": 0}
    five = Schedule(solver="unipc", timesteps=(1000.0, 900.0, 700.0, 450.0, 150.0), guidance_scale=5.0)
    assert re.findall(r"unipc|[\d.]+", five.describe()) == ["5", "unipc", "10"]
    figures = {"psnr": 38.9, "plain_psnr": 35.2, "held_out": 8}
    measured = msgspec.structs.replace(five, guidance_scale=1, measured=figures)
    assert re.findall(r"unipc|[\d.]+", measured.describe()) == ["5", "unipc", "5", "38.9", "35.2"]


def test_a_component_has_the_bytes_of_its_arrays() -> None:
    parameters = {
        path: Parameter(
            layout=ArrayLayout(shape, "bfloat16", 2, 1), axes=(None, None), crc32c=("0",) * 2, sha256=""
        )
        for path, shape in {"a/b": (4, 6), "ab": (2, 6)}.items()
    }
    assert Component("weights/vae", parameters).nbytes == 2 * (24 + 12)
    assert Component("weights/vae", {}).nbytes == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("float32[2,3]", ("float32", (2, 3))),
        ("uint8[7]", ("uint8", (7,))),
        ("bool[]", ("bool", ())),
        ("bfloat16[1,16,3,8,12]", ("bfloat16", (1, 16, 3, 8, 12))),
    ],
)
def test_an_array_as_text(text: str, expected: tuple[str, tuple[int, ...]]) -> None:
    assert aval(text) == expected
    made = plain_program(inputs=("w", "x", "y"), donate=(1, 2), avals={"inputs": {"x": text}})
    assert made.array("x") == expected and made.donated == ("x", "y")


def test_names_of_profiles_and_keys_of_sets() -> None:
    """A key is of what changes a program."""
    names = [
        Profile(832, 480, 81, 2, guidance, 0, built_with(), references).name
        for guidance, references in ((True, 0), (False, 0), (True, 3))
    ]
    assert names == ["832x480x81-b2-cfg", "832x480x81-b2-nocfg", "832x480x81-b2-cfg-r3"]
    first = program_set({})
    assert first.key.startswith("cpu-") and len(first.key) == len("cpu-") + 8
    assert program_set({"p": {"prepare": plain_program()}}).key == first.key  # programs may be added
    kernels = Kernels("cpu", "direct", weight_bits=True, image_multiple=1)
    changes: list[dict[str, Any]] = [
        {"platform": "tpu"},
        {"mesh": {"data": 2}},
        {"jax": "1"},
        {"kernels": kernels},
    ]
    others = [msgspec.structs.replace(first, **one).key for one in changes]
    assert len({first.key, *others}) == 1 + len(others)
