"""A program that does not fit what it is given, or its record, is refused before anything is compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax import export

from helpers.damage import PROFILE, PROGRAMS, resealed
from helpers.manifests import plain_program, programs_of
from helpers.refusals import refuses
from wanbuild.build import compile_artifact
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.programs.entry_compiler import EntryCompiler
from wanbuild.programs.export import describe, export_program, layer_stacks, profile_of
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.programs.spec import program
from wanbuild.programs.wiring import aval_text, check_program, check_set
from wanbuild.targets.target import resolve_target
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.programs import PlainFile, Program, ProgramSet
from wanrun.errors import ArtifactError
from wanrun.executables.executables import LoadedProgram
from wanrun.executables.lowering import lower

Changed = Callable[[Any], Any]


def described(manifest: Manifest, rank: int = 0) -> Manifest:
    """The manifest with the records of one profile, with all forms of the loop; nothing is exported."""
    target = resolve_target("cpu")
    options = BuildOptions(dtype="float32", loop="all", lora_rank=rank)
    profile = profile_of(manifest, Shape(96, 64, 9, 1, True), options)
    builder = ProgramBuilder(manifest, Shape.of(profile), options, *target.programs_for)
    programs = {
        spec.name: Program(
            file=f"programs/{spec.name}",
            sha256="0",
            inputs=spec.inputs,
            donate=spec.donate_argnums,
            avals=describe(spec, manifest.components),
            role=spec.role,
            place=spec.place,
        )
        for spec in builder.programs()
    }
    vae = manifest.components["vae"].parameters
    path, layout = next((path, one.layout) for path, one in vae.items() if len(one.layout.shape) > 1)
    text = aval_text(layout.dtype, *layout.shape)
    programs["spread_vae"] = plain_program(
        role="spread",
        inputs=("rows",),
        avals={"inputs": {"rows": {path: text}}, "outputs": {"weights": {path: text}}},
    )
    programs["attention"] = plain_program(
        role="attention",
        inputs=("q",),
        avals={"inputs": {"q": "float32[3]"}, "outputs": {"out": "float32[3]"}},
        plain=PlainFile(file="programs/attention_plain", sha256="0"),
    )
    own = ProgramSet(
        platform="cpu",
        kernels=target.kernels,
        mesh={},
        jax="0",
        programs={profile.name: programs},
        layers=layer_stacks(builder),
    )
    return manifest.changed(
        profiles={profile.name: profile}, program_sets={own.key: own}, targets={}, golden={}
    )


@pytest.fixture(scope="module")
def written(toy_artifact: Path) -> dict[str, Any]:
    """The records of the toy's programs as JSON. Not to be changed."""
    return described(read_manifest(toy_artifact)).as_json()


@pytest.fixture(scope="module")
def written_with_slots(toy_artifact: Path) -> dict[str, Any]:
    """The same of programs with slots."""
    return described(read_manifest(toy_artifact), RANK).as_json()


def check(data: dict[str, Any]) -> None:
    manifest = msgspec.convert(resealed(data), Manifest)
    (key,) = manifest.program_sets
    check_set(manifest, key)


def _programs(data: dict[str, Any]) -> Any:
    (programs,) = data["program_sets"].values()
    return programs["programs"][PROFILE]


def put(data: dict[str, Any], path: str, value: Any) -> None:
    """Changes what a path leads to, from a program, the model, the tokenizer or the profile's options.

    A function gives the value from all programs; ``DROP`` takes the place away.
    """
    programs = _programs(data)
    given = {"model": data["model"], "tokenizer": data["tokenizer"]}
    place = {**given, "options": data["profiles"][PROFILE]["options"], **programs}
    *keys, last = path.split(".")
    for key in keys:
        place = place[key]
        if last != "role" and keys[0] in programs and key == keys[0]:
            place = place["avals"]
    place = place if keys else programs
    if value is DROP:
        del place[last]
    else:
        place[last] = value(programs) if callable(value) else value
    if keys and keys[0] == "model":
        data["preview"] = []  # whose rows are the latents' channels


def taking(name: str, key: str, maker: str) -> Changed:
    """A program that takes an output of another one."""

    def changed(programs: Any) -> Any:
        one, made = programs[name], programs[maker]["avals"]["outputs"][key]
        avals = {**one["avals"], "inputs": {**one["avals"]["inputs"], key: made}}
        return {**one, "inputs": [*one["inputs"], key], "avals": avals}

    return changed


def spread(kind: str, name: str) -> Changed:
    return lambda programs: dict.fromkeys(programs["spread_vae"]["avals"][kind][name], NEW)


def without_slots(*names: str) -> Changed:
    """Programs of which a chosen LoRA would change nothing; gives the first."""

    def changed(programs: Any) -> Any:
        for one in map(programs.get, names):
            donated = [one["inputs"][index] for index in one["donate"]]
            one["inputs"] = [key for key in one["inputs"] if key != "lora"]
            one["donate"] = [one["inputs"].index(key) for key in donated]
            one["avals"]["inputs"].pop("lora")
        return programs[names[0]]

    return changed


DROP, NEW, RANK = object(), "uint8[3]", 4
IMAGE = {"image": {"kind": "image", "array": "image"}}
HELD = {"condition": "c", "latents": "l", "mask": "latents"}

CHANGES: list[tuple[str, Any, str]] = [
    ("model.latent_channels", 17, "program decode_first of|inputs.latents"),
    ("model.vae_spatial", 16, "inputs.latents"),
    ("model.leading_latents", 1, "inputs.latents"),
    ("model.text_width", 64, "program encode_text_64 of|outputs.embeddings"),
    ("model.options.conditioning_scale", 1.0, "of form step that take conditioning_scale; expected one"),
    ("model.options.boundary", 0.5, "transformers, with a default boundary; expected two; found one"),
    ("model.task.inputs", IMAGE, "programs of role window; expected one"),
    ("model.task.held", HELD, "programs that make c.l; expected one"),
    ("tokenizer.max_length", 256, "inputs.embeddings; expected float32[2,256"),
    ("tokenizer.max_length", 99, "tokens of the longest text encoder; expected 99"),
    ("options.dtype", "bfloat16", "program encode_text_64 of|outputs.embeddings"),
    ("options.scheduler_dtype", "bfloat16", "inputs.latents"),
    ("options.max_steps", 99, "program denoise_loop of|inputs.coefficients"),
    ("prepare.role", "once", "programs of role prepare; expected one; found nothing"),
    ("decode_video.role", "window", "programs of role decode; expected one; found nothing"),
    ("denoise_loop", DROP, "programs of role scan; expected one"),
    ("stream_leave", DROP, "programs of role leave; expected one"),
    ("encode_text", DROP, "tokens of the longest text encoder; expected 512; found 256"),
    (
        "other",
        lambda programs: {**programs["denoise_step"], "place": 1},
        "programs of role step; expected one; found denoise_step, other",
    ),
    ("prepare.outputs.rope", DROP, "denoise_step of|inputs.rope; expected nothing; found a dict of"),
    ("prepare.outputs.rope", NEW, "inputs.rope; expected uint8[3]; found a dict of"),
    ("denoise_step.inputs.timestep", "float32[1]", "timestep; expected float32[]; found float32[1]"),
    ("denoise_step.inputs.timestep", DROP, "inputs.timestep; expected float32[]; found nothing"),
    ("denoise_step.inputs.guidance_scale", "int32[]", "inputs.guidance_scale; expected float32[]"),
    ("denoise_step.outputs.history", NEW, "outputs.history; expected a dict of"),
    ("denoise_loop.inputs.first", "int32[1]", "inputs.first; expected int32[]; found int32[1]"),
    ("decode_video.outputs.frames", "uint8[4,64,96,4]", "outputs.frames; expected uint8[4,64,96,3]"),
    ("encode_text.inputs.mask", "int32[512]", "program encode_text of|inputs.mask"),
    ("stream_blocks.inputs.kv", NEW, "program stream_blocks of|inputs.kv; expected a dict of"),
    ("stream_keys_blocks.outputs.kv", NEW, "program stream_blocks of|inputs.kv; expected uint8[3]"),
    ("stream_blocks.outputs.carry", NEW, "program stream_blocks of|outputs.carry; expected "),
    ("stream_blocks.outputs.carry", DROP, "outputs.carry; expected a dict of|found nothing"),
    ("stream_enter.outputs.carry", NEW, "program stream_"),
    (
        "other",
        lambda programs: programs["stream_blocks"],
        "programs of role layer; expected blocks; found blocks, blocks",
    ),
    ("stream_context", taking("stream_context", "carry", "stream_enter"), "carry; expected nothing"),
    ("stream_enter", taking("stream_enter", "kv", "stream_keys_blocks"), "inputs.kv; expected nothing"),
    (
        "spread_x",
        lambda programs: programs.pop("spread_vae"),
        "a program that spreads weights; expected spread_",
    ),
    ("spread_vae.inputs.rows", spread("inputs", "rows"), "spread_vae of|inputs.rows.|found uint8[3]"),
    ("spread_vae.outputs.weights", spread("outputs", "weights"), "outputs.weights.|found uint8[3]"),
    ("spread_vae.inputs.rows", {}, "inputs.rows; expected parameters"),
    ("spread_vae.inputs.rows", {"more": NEW}, "inputs.rows; expected parameters"),
    ("attention.outputs.out", NEW, "program attention of|outputs.out; expected float32[3]"),
]
SLOT_CHANGES: list[tuple[str, Any, str]] = [
    ("options.lora_rank", RANK + 1, "prepare of|lora.blocks.attn1.to_k.lora_a; expected float32["),
    ("options.lora_rank", 0, "program prepare of|inputs.lora; expected nothing; found a dict of"),
    ("denoise_step.inputs.lora", NEW, "program denoise_step of|inputs.lora; expected a dict of"),
    ("stream_blocks.inputs.lora", {}, "stream_blocks of|inputs.lora.attn1; expected a dict of"),
    ("stream_leave.inputs.lora.blocks", {}, "stream_leave of|inputs.lora.blocks; expected nothing"),
    ("prepare", without_slots("prepare", "denoise_step"), "of form step that take lora; expected one"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "value", "parts"), CHANGES)
def test_what_does_not_fit_is_refused(written: dict[str, Any], path: str, value: Any, parts: str) -> None:
    check(written)
    data = copy.deepcopy(written)
    put(data, path, value)
    with pytest.raises(ArtifactError, match=PROFILE) as caught:
        check(data)
    assert all(part in str(caught.value) for part in parts.split("|")), caught.value
    assert caught.value.exit_code == 3


@pytest.mark.thorough
@pytest.mark.parametrize(("path", "value", "parts"), SLOT_CHANGES)
def test_slots_that_do_not_fit_are_refused(
    written_with_slots: dict[str, Any], path: str, value: Any, parts: str
) -> None:
    test_what_does_not_fit_is_refused(written_with_slots, path, value, parts)


@pytest.mark.slow
def test_nothing_is_compiled_of_what_does_not_fit(
    artifact_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(spec: Any, components: Any) -> dict[str, Any]:
        avals = describe(spec, components)
        return {**avals, "outputs": dict.fromkeys(avals["outputs"], NEW)}

    monkeypatch.setattr("wanbuild.programs.export.describe", wrong)
    monkeypatch.setattr(EntryCompiler, "compile", lambda *_: pytest.fail("it is compiled"))
    before = read_manifest(artifact_copy)
    with refuses("mismatch", ArtifactError, what="outputs.embeddings", expected="bfloat16[1,64,32]"):
        compile_artifact(CompileRequest(artifact_copy, ["cpu"], [(32, 16)], [1]), print)
    assert read_manifest(artifact_copy) == before


def exported(artifact: Path, name: str, record: Program) -> export.Exported:
    return export.deserialize(bytearray(open_artifact(artifact).program(record)))


def test_files_and_their_records(toy_artifact: Path) -> None:
    manifest = read_manifest(toy_artifact)
    records = programs_of(manifest, PROFILE)
    assert sorted(records) == sorted(PROGRAMS)
    files = {name: exported(toy_artifact, name, record) for name, record in records.items()}
    for name, record in records.items():
        check_program(name, record, manifest.components, True, files[name])

    def differs(name: str, record: Program, where: str, bits: bool = True, **components: Any) -> None:
        with pytest.raises(ArtifactError) as caught:
            check_program(name, record, {**manifest.components, **components}, bits, files["denoise_step"])
        assert caught.value.what.startswith(f"program {name} ") and where in str(caught.value)

    step = records["denoise_step"]
    taken = step.avals["inputs"]
    for given, where in (
        ({**taken, "timestep": "float32[1]"}, "inputs.timestep; expected float32[1]; found float32[]"),
        ({**taken, "history": "float32[]"}, "inputs.history; expected float32[]; found a dict of 3"),
        (
            {k: v for k, v in taken.items() if k != "timestep"},
            "inputs.timestep; expected nothing; found float",
        ),
    ):
        differs("denoise_step", msgspec.structs.replace(step, avals={**step.avals, "inputs": given}), where)
    more = msgspec.structs.replace(step, inputs=(*step.inputs, "vae"))
    differs("denoise_step", more, "inputs.vae; expected a dict of 4; found nothing")
    differs("another", step, "name; expected another; found denoise_step")
    transformer = manifest.components["transformer"]
    path, parameter = next(iter(transformer.parameters.items()))
    layout = msgspec.structs.replace(parameter.layout, dtype="bfloat16")
    changed = {**transformer.parameters, path: msgspec.structs.replace(parameter, layout=layout)}
    other = msgspec.structs.replace(transformer, parameters=changed)
    place = f"inputs.transformer.{path.replace('/', '.')}; expected "
    differs("denoise_step", step, f"{place}uint16[", transformer=other)
    differs("denoise_step", step, f"{place}bfloat16[", bits=False, transformer=other)


def minus(a: jax.Array, b: jax.Array) -> Mapping[str, jax.Array]:
    return {"c": a - 2 * b}


AVALS = {"inputs": {"a": "float32[]", "b": "float32[]"}, "outputs": {"c": "float32[]"}}


def test_two_inputs_of_one_shape_cannot_be_exchanged() -> None:
    """They go by name: the order in which the manifest lists them means nothing."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    data = export_program(program("minus", minus, {"a": scalar, "b": scalar}), "cpu")
    for order in (("a", "b"), ("b", "a")):
        record = plain_program(inputs=order, avals=AVALS)
        check_program("minus", record, {}, False, export.deserialize(bytearray(data)))
        compiled = lower(data, "minus", (), jax.devices("cpu")[0]).compile()
        assert LoadedProgram(compiled, order)(a=np.float32(7), b=np.float32(2))["c"] == 3


def test_a_program_without_names_is_refused() -> None:
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    file = export.export(jax.jit(minus))(scalar, scalar)
    record = plain_program(inputs=("a", "b"), avals=AVALS)
    beside = export.export(jax.jit(lambda x, *, a, b: minus(a, b)))(scalar, a=scalar, b=scalar)
    for found, unnamed in ((file, 2), (beside, 1)):
        with pytest.raises(ArtifactError) as caught:
            check_program("minus", record, {}, False, found)
        assert caught.value.found == unnamed
