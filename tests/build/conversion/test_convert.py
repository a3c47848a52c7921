"""Conversion against a naive one: all is loaded, renamed, stacked and cast by hand."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from helpers.checkpoint_files import load_file, save_file
from helpers.hub_server import read_folder
from helpers.naive_conversion import assert_equals_naive
from helpers.refusals import refuses
from wanbuild.build import convert
from wanbuild.build_options import BuildOptions
from wanbuild.components import kind_of
from wanbuild.conversion import orbax as layout_module
from wanbuild.conversion import writer as writer_module
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.models.params import parameter_axes
from wanbuild.models.partition import ROTARY
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.targets.target import CPU
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.toy.toy_configs import TOY_VARIANTS
from wanbuild.toy.toy_weights import Stored
from wanbuild.variants.from_video import with_start
from wanbuild.variants.table import variants
from wanrun.artifact.manifest import MANIFEST, Manifest, read_manifest
from wanrun.errors import ArtifactError, SourceError

COMPONENTS = ("transformer", "vae", "text_encoder")
DEFAULT: dict[str, str | None] = {}
ALL_FLOAT32: dict[str, str | None] = dict.fromkeys((*COMPONENTS, "image_encoder"), "float32")
SOURCE_DTYPES: Mapping[str, Any] = MappingProxyType(
    {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
)


def wild_values(shape: tuple[int, ...], dtype: np.dtype, random: np.random.Generator) -> np.ndarray:
    """Random bit patterns: every exponent, subnormal numbers, both signs, ties; all finite in bfloat16."""
    largest = {"float32": 0x7F7F7FFF, "float16": 0x7BFF, "bfloat16": 0x7F7F}[dtype.name]
    bits = np.dtype(f"u{dtype.itemsize}")
    value = random.integers(0, largest + 1, shape, bits)
    if dtype == np.float32:  # half of them exactly between two bfloat16 numbers
        ties = np.minimum((value & 0x7FFF0000) | 0x8000, largest)
        value = np.where(random.random(shape) < 0.5, ties, value).astype(bits)
    sign = random.integers(0, 2, shape, bits) << (8 * dtype.itemsize - 1)
    return (value | sign).view(dtype)


def write_wild(checkpoint: Path, variant: str, dtype: str, shards: int) -> None:
    """A toy whose every tensor holds random bit patterns; ``mixed`` has three dtypes in each file."""
    write_toy(
        checkpoint,
        variant,
        stored=Stored(dtype="float32" if dtype == "mixed" else dtype, shards=shards),
        seed=3,
    )
    random = np.random.default_rng(5)
    kept = [SOURCE_DTYPES[dtype]] if dtype in SOURCE_DTYPES else list(SOURCE_DTYPES.values())
    for file in checkpoint.rglob("*.safetensors"):
        state = load_file(file)
        if dtype != "mixed":
            assert {value.dtype for value in state.values()} == set(map(np.dtype, kept))
        kinds = map(np.dtype, itertools.cycle(kept))
        save_file({key: wild_values(x.shape, next(kinds), random) for key, x in state.items()}, file)
    large = variant.startswith("helios")  # of which one tensor is most of a shard
    assert len(list((checkpoint / "transformer").glob("*.safetensors"))) == shards - large


def kinds_of_source() -> list[Any]:
    """(variant, dtype, shards): all dtypes of the first variant; the others differ in their names alone."""
    first, *others = TOY_VARIANTS
    every = itertools.product([first], [*SOURCE_DTYPES, "mixed"], [1])
    return [*every, *itertools.product([first, *others], ["mixed"], [3])]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("variant", "dtype", "shards", "dtypes"),
    [
        *((*kind, DEFAULT) for kind in kinds_of_source()),
        *((*kind, ALL_FLOAT32) for kind in kinds_of_source() if kind[0] == next(iter(TOY_VARIANTS))),
    ],
)
def test_conversion_equals_the_naive_one(
    tmp_path: Path, variant: str, dtype: str, shards: int, dtypes: Mapping[str, str | None]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_wild(checkpoint, variant, dtype, shards)
    convert(ConvertRequest(checkpoint, tmp_path / "artifact", dtypes, threads=2))
    assert_equals_naive(tmp_path / "artifact", checkpoint, all_float32=bool(dtypes))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 8])
def test_large_layouts_equal_the_naive_conversion(
    threads: int, toy_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk file per layer, large arrays split, and several blocks a row: what published sizes have."""
    monkeypatch.setattr(layout_module, "SMALL_BYTES", 0)
    monkeypatch.setattr(layout_module, "LARGE_BYTES", 2000)
    monkeypatch.setattr(writer_module, "BLOCK_ITEMS", 100)
    manifest = convert(ConvertRequest(toy_checkpoint, tmp_path / "artifact", threads=threads))
    transformer, text = (manifest.components[name].parameters for name in ("transformer", "text_encoder"))
    assert transformer["blocks/ffn/up/weight"].layout.chunks == 3
    assert text["shared"].layout.chunks > 3
    assert_equals_naive(tmp_path / "artifact", toy_checkpoint, all_float32=False)


# --- the same source, the same artifact -------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with the default dtypes, one thread. Not to be changed."""
    artifact = tmp_path_factory.mktemp("converted") / "artifact"
    convert(ConvertRequest(toy_checkpoint, artifact, threads=1))
    return artifact


def test_the_manifest_says_what_was_converted(converted: Path, toy_checkpoint: Path) -> None:
    manifest = read_manifest(converted)
    for name in COMPONENTS:
        config = json.loads((toy_checkpoint / name / "config.json").read_text())
        assert manifest.configs[name] == config
        assert manifest.components[name].folder == f"weights/{name}"
    tokenizer = converted / manifest.tokenizer.file
    assert tokenizer.read_bytes() == (toy_checkpoint / "tokenizer" / "tokenizer.json").read_bytes()
    assert set(manifest.source["files"]) >= {f"{name}/config.json" for name in COMPONENTS}


def test_conversion_is_deterministic(converted: Path, toy_checkpoint: Path, tmp_path: Path) -> None:
    """With other threads, from another place and into another place: the same bytes, but for the times."""
    elsewhere = shutil.copytree(toy_checkpoint, tmp_path / "a" / "copied checkpoint")
    convert(ConvertRequest(elsewhere, tmp_path / "other", threads=3))
    first, second = read_manifest(converted), read_manifest(tmp_path / "other")
    assert first.content_digest == second.content_digest
    files, others = read_folder(converted), read_folder(tmp_path / "other")
    assert files.keys() == others.keys()
    assert [name for name in files if files[name] != others[name]] in ([], [MANIFEST])
    assert first.changed(times={}).as_json() == second.changed(times={}).as_json()


def test_the_manifest_holds_no_absolute_path(converted: Path, toy_checkpoint: Path) -> None:
    text = (converted / MANIFEST).read_text()
    for folder in (converted, toy_checkpoint):
        for parent in (folder, *folder.parents[:-1]):
            assert f'"{parent}' not in text
            assert f"{parent}/" not in text


@pytest.mark.slow
def test_what_changes_the_digest(converted: Path, toy_checkpoint: Path, tmp_path: Path) -> None:
    digests = {"as it is": read_manifest(converted).content_digest}

    def add(name: str, checkpoint: Path, **options: Any) -> Manifest:
        manifest = convert(ConvertRequest(checkpoint, tmp_path / name, **options))
        digests[name] = manifest.content_digest
        return manifest

    add("transformer dtype", toy_checkpoint, dtypes={"transformer": "float32"})
    add("text dtype", toy_checkpoint, dtypes={"text_encoder": "float32"})
    add("negative prompt", toy_checkpoint, negative_prompt="blurred")
    shutil.copytree(toy_checkpoint, tmp_path / "checkpoint")
    state = load_file(file := tmp_path / "checkpoint" / "vae" / "diffusion_pytorch_model.safetensors")
    bits = state["decoder.conv_out.bias"].view(np.int32)
    bits[1] ^= 1  # the last bit of one weight
    save_file(state, file)
    changed = add("one bit", tmp_path / "checkpoint")
    assert len(set(digests.values())) == len(digests)
    before, after = (
        m.components["vae"].parameters["decoder/conv_out/bias"] for m in (read_manifest(converted), changed)
    )
    assert before.crc32c != after.crc32c
    assert before.sha256 != after.sha256


# --- sources that are refused -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_value_that_is_not_finite_leaves_the_artifact_that_was_there(
    toy_checkpoint: Path, converted: Path, tmp_path: Path
) -> None:
    """What is not finite is in tests/hostile."""
    checkpoint = shutil.copytree(toy_checkpoint, tmp_path / "checkpoint")
    state = load_file(file := checkpoint / "vae" / "diffusion_pytorch_model.safetensors")
    state["decoder.conv_out.bias"][-1] = np.inf
    save_file(state, file)
    artifact = shutil.copytree(converted, tmp_path / "artifact")
    before = read_folder(artifact)
    with refuses("not_finite", SourceError, what="vae: decoder.conv_out.bias ") as caught:
        convert(ConvertRequest(checkpoint, artifact, force=True))
    assert caught.value.exit_code == 4
    assert read_folder(artifact) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "checkpoint"]


# --- logical axes: those of the modules that programs are made of ---


@pytest.mark.thorough
@pytest.mark.parametrize("variant", variants())
def test_axes_are_the_modules(variant: str, tmp_path: Path) -> None:
    write_toy(tmp_path / "toy", variant)
    manifest = convert(ConvertRequest(tmp_path / "toy", tmp_path / "artifact"))
    for name, component in manifest.components.items():
        kind = kind_of(name, manifest.configs[name].get("_class_name"))
        module = kind.module(kind.parse(manifest.configs[name], name), manifest.dtypes[name])
        recorded = {path: parameter.axes for path, parameter in component.parameters.items()}
        assert recorded == parameter_axes(module)
        named = {axis for axes in recorded.values() for axis in axes} - {None, "layers"}
        assert bool(named) == (name != "vae")  # which is not split: its convolutions are small


def in_pairs(manifest: Manifest) -> Manifest:
    """A manifest as versions wrote it whose queries and keys had the rows of rotated pairs side by side."""
    components = {
        name: msgspec.structs.replace(
            component,
            parameters={
                path: msgspec.structs.replace(
                    one, axes=tuple("heads" if a == ROTARY else a for a in one.axes)
                )
                for path, one in component.parameters.items()
            },
        )
        for name, component in manifest.components.items()
    }
    assert components != manifest.components
    return manifest.changed(components=components)


def started(manifest: Manifest) -> Manifest:
    """The manifest of an artifact whose profiles are built for a video to begin with."""
    profiles = {
        name: msgspec.structs.replace(one, options=msgspec.structs.replace(one.options, video_to_video=True))
        for name, one in manifest.profiles.items()
    }
    return manifest.changed(**with_start(manifest, True), profiles=profiles)


@pytest.mark.slow
def test_rows_in_pairs_make_no_programs(artifact_copy: Path, toy_checkpoint: Path) -> None:
    """Neither new ones, nor do a new conversion's weights take over the old ones."""
    old = in_pairs(read_manifest(artifact_copy))
    with refuses("other_release", ArtifactError, what="transformer/blocks/attn1/norm_k/weight"):
        ProgramBuilder(old, Shape(96, 64, 9, 1, True), BuildOptions(), CPU)
    stored = {name: policy.weights for name, policy in old.dtypes.items()}
    started(read_manifest(artifact_copy)).write(artifact_copy)
    kept = convert(ConvertRequest(toy_checkpoint, artifact_copy, stored, force=True))
    assert kept.program_sets and kept.model.task.start == "video" and kept.preview == old.preview != ()
    in_pairs(read_manifest(artifact_copy)).write(artifact_copy)
    assert not convert(ConvertRequest(toy_checkpoint, artifact_copy, stored, force=True)).program_sets
