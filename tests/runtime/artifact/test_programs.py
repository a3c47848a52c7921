"""What the manifest says of programs: arrays as text, names of profiles, and keys of sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from helpers.manifests import built_with, plain_program, program_set
from helpers.refusals import refuses
from wanrun.artifact.programs import Kernels, PlainFile, Profile, aval
from wanrun.errors import ArtifactError


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
    program = plain_program(inputs=("x",), avals={"inputs": {"x": text}})
    assert program.array("x") == expected


@pytest.mark.parametrize(
    ("guidance", "references", "name"),
    [
        (True, 0, "832x480x81-b2-cfg"),
        (False, 0, "832x480x81-b2-nocfg"),
        (True, 3, "832x480x81-b2-cfg-r3"),
    ],
)
def test_a_profile_s_name(guidance: bool, references: int, name: str) -> None:
    assert Profile(832, 480, 81, 2, guidance, 0, built_with(), references).name == name


def test_a_set_s_key_is_of_what_changes_a_program() -> None:
    first = program_set({})
    assert first.key.startswith("cpu-") and len(first.key) == len("cpu-") + 8
    assert program_set({"p": {"prepare": plain_program()}}).key == first.key  # programs may be added
    others = [
        msgspec.structs.replace(first, platform="tpu"),
        msgspec.structs.replace(first, mesh={"data": 2}),
        msgspec.structs.replace(first, jax="1"),
        msgspec.structs.replace(first, kernels=Kernels("cpu", "direct", weight_bits=True, image_multiple=1)),
    ]
    assert len({first.key, *(other.key for other in others)}) == 1 + len(others)


@pytest.mark.parametrize("file", ["/etc/passwd", "../x", "programs//x"])
def test_a_program_lies_in_its_artifact(file: str) -> None:
    for make in (plain_program, PlainFile):
        with refuses("untrusted", ArtifactError, what="a program", found=repr(file)):
            make(file=file, sha256="")


def test_a_program_has_the_plain_form_that_proves_it() -> None:
    plain = PlainFile(file="p", sha256="0")
    assert plain_program(role="attention", plain=plain).plain == plain
    for role, other in (("attention", None), ("prepare", plain)):
        with pytest.raises(ValueError, match="plain"):
            plain_program(role=role, plain=other)


STATE = {"inputs": {"x": "float32[]"}, "outputs": {"x": "float32[]"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": ("x", "x")},
        {"inputs": ("x",), "donate": (1,)},
        {"inputs": ("x",), "donate": (0, 0)},
        {"avals": {"inputs": {"x": "float32"}}},
        {"avals": {"inputs": {"x": "float32[2,3"}}},
        {"avals": {"inputs": {"x": "float32[-1]"}}},
        {"avals": {"outputs": {"x": {"y": 3}}}},
        {"avals": {"inputs": []}},
        {"avals": {"others": {}}},
        {"avals": {"inputs": {"x": "int33[2]"}}},
        {"role": "step", "inputs": ("x",), "avals": STATE},
        {"role": "step", "inputs": ("x",), "donate": (0,), "avals": {**STATE, "outputs": {}}},
        {"role": "scan", "inputs": ("x",), "donate": (0,), "avals": {**STATE, "inputs": {}}},
    ],
)
def test_a_program_that_makes_no_sense(fields: Mapping[str, Any]) -> None:
    plain_program(role="step", inputs=("x",), donate=(0,), avals=STATE)
    with pytest.raises(msgspec.ValidationError):
        plain_program(**fields)


def test_donated_inputs_have_names() -> None:
    assert plain_program(inputs=("weights", "latents", "history"), donate=(1, 2)).donated == (
        "latents",
        "history",
    )
