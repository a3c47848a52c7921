"""What a program's file takes and gives is what the manifest says, or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax import export

from helpers.damage import PROFILE, PROGRAMS
from helpers.manifests import plain_program, programs_of
from wanbuild.programs.export import export_program
from wanbuild.programs.signature import aval_text, check_signature
from wanbuild.programs.spec import program
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.programs import Program, aval
from wanrun.errors import ArtifactError
from wanrun.executables.lowering import lower
from wanrun.executables.store import LoadedProgram


@pytest.fixture(scope="module")
def manifest(toy_artifact: Path) -> Manifest:
    return read_manifest(toy_artifact)


def exported(artifact: Path, name: str, record: Program) -> export.Exported:
    return export.deserialize(bytearray(open_artifact(artifact).program(record)))


def test_records_that_are_true(toy_artifact: Path, manifest: Manifest) -> None:
    records = programs_of(manifest, PROFILE)
    assert sorted(records) == sorted(PROGRAMS)
    for name, record in records.items():
        check_signature(name, record, manifest.components, True, exported(toy_artifact, name, record))


def with_inputs(record: Program, **changes: Any) -> Program:
    """The record with other descriptions of inputs; None leaves one out."""
    inputs = {**record.avals["inputs"], **changes}
    inputs = {name: text for name, text in inputs.items() if text is not None}
    names = tuple(name for name in record.inputs if changes.get(name, "") is not None)
    new = tuple(name for name in changes if name not in record.inputs)
    return msgspec.structs.replace(record, inputs=(*names, *new), avals={**record.avals, "inputs": inputs})


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (
            lambda r: with_inputs(r, timestep="float32[1]"),
            "inputs.timestep; expected float32[1]; found float32[]",
        ),
        (lambda r: with_inputs(r, timestep="int32[]"), "inputs.timestep; expected int32[]; found float32[]"),
        (
            lambda r: with_inputs(r, timestep=None, time="float32[]"),
            "inputs.time; expected float32[]; found nothing",
        ),
        (lambda r: with_inputs(r, more="float32[]"), "inputs.more; expected float32[]; found nothing"),
        (
            lambda r: with_inputs(r, timestep=r.avals["inputs"]["coefficients"]),
            "inputs.timestep; expected float32[9]; found float32[]",
        ),
        (
            lambda r: with_inputs(r, history="float32[]"),
            "inputs.history; expected float32[]; found a dict of 3",
        ),
        (
            lambda r: msgspec.structs.replace(r, role="prepare", avals={**r.avals, "outputs": {}}),
            "outputs.history; expected nothing; found a dict of 3",
        ),
        (
            lambda r: msgspec.structs.replace(
                r, role="prepare", inputs=tuple(n for n in r.inputs if n != "transformer")
            ),
            "inputs.transformer; expected nothing; found a dict of",
        ),
        (
            lambda r: msgspec.structs.replace(r, inputs=(*r.inputs, "vae")),
            "inputs.vae; expected a dict of 4; found nothing",
        ),
    ],
)
def test_a_record_that_is_not_true(
    toy_artifact: Path, manifest: Manifest, change: Callable[[Program], Program], where: str
) -> None:
    record = programs_of(manifest, PROFILE)["denoise_step"]
    file = exported(toy_artifact, "denoise_step", record)
    with pytest.raises(ArtifactError) as caught:
        check_signature("denoise_step", change(record), manifest.components, True, file)
    assert f"program denoise_step is not what the manifest says: {where}" in str(caught.value)


def test_the_file_of_another_program(toy_artifact: Path, manifest: Manifest) -> None:
    """Even if it takes and gives the same."""
    record = programs_of(manifest, PROFILE)["prepare"]
    file = exported(toy_artifact, "prepare", record)
    with pytest.raises(ArtifactError, match="its name; expected decode_video; found prepare"):
        check_signature("decode_video", record, manifest.components, True, file)


def test_weights_of_another_dtype(toy_artifact: Path, manifest: Manifest) -> None:
    record = programs_of(manifest, PROFILE)["decode_video"]
    file = exported(toy_artifact, "decode_video", record)
    vae = manifest.components["vae"]
    path, parameter = next(iter(vae.parameters.items()))
    layout = msgspec.structs.replace(parameter.layout, dtype="bfloat16")
    changed = msgspec.structs.replace(parameter, layout=layout)
    vae = msgspec.structs.replace(vae, parameters={**vae.parameters, path: changed})
    for bits, expected in ((True, "uint16"), (False, "bfloat16")):
        with pytest.raises(ArtifactError, match=rf"inputs\.vae\..*; expected {expected}\["):
            check_signature("decode_video", record, {"vae": vae}, bits, file)


def minus(a: jax.Array, b: jax.Array) -> Mapping[str, jax.Array]:
    return {"c": a - 2 * b}


def test_two_inputs_of_one_shape_cannot_be_exchanged() -> None:
    """They go by name: the order in which the manifest lists them means nothing."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    data = export_program(program("minus", minus, {"a": scalar, "b": scalar}), "cpu")
    avals = {"inputs": {"a": "float32[]", "b": "float32[]"}, "outputs": {"c": "float32[]"}}
    for order in (("a", "b"), ("b", "a")):
        record = plain_program(inputs=order, avals=avals)
        check_signature("minus", record, {}, False, export.deserialize(bytearray(data)))
        compiled = lower(data, "minus", (), jax.devices("cpu")[0]).compile()
        assert LoadedProgram(compiled, order)(a=np.float32(7), b=np.float32(2))["c"] == 3


def test_a_program_without_names_is_refused() -> None:
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    file = export.export(jax.jit(minus))(scalar, scalar)
    avals = {"inputs": {"a": "float32[]", "b": "float32[]"}, "outputs": {"c": "float32[]"}}
    with pytest.raises(ArtifactError, match="its inputs; expected names; found 2 without"):
        check_signature("minus", plain_program(inputs=("a", "b"), avals=avals), {}, False, file)


def test_an_array_in_words() -> None:
    assert aval_text("float32", 2, 3) == "float32[2,3]" and aval_text("bool") == "bool[]"
    assert aval(aval_text("uint8", 7)) == ("uint8", (7,))
