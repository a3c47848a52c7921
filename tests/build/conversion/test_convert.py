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
import numpy as np
import pytest

from helpers.checkpoint_files import load_file, save_file
from helpers.naive_conversion import assert_equals_naive
from helpers.original_checkpoint import original_keys
from helpers.refusals import refuses
from wanbuild.build import convert
from wanbuild.conversion import orbax as layout_module
from wanbuild.conversion import writer as writer_module
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.mapping.original import diffusers_names
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.toy.toy_configs import TOY_VARIANTS
from wanbuild.toy.toy_weights import Stored
from wanrun.artifact.manifest import MANIFEST, Manifest, read_manifest
from wanrun.errors import SourceError

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


@pytest.mark.thorough
@pytest.mark.parametrize("dtypes", [DEFAULT, ALL_FLOAT32], ids=["default", "all float32"])
@pytest.mark.parametrize("variant", ["wan2.1-t2v", "wan2.1-flf2v", "wan2.1-vace"])
def test_the_original_naming_equals_the_naive_conversion(
    tmp_path: Path, variant: str, dtypes: Mapping[str, str | None]
) -> None:
    """One file of mixed dtypes, which has the original names, beside the other components."""
    checkpoint = tmp_path / "checkpoint"
    write_wild(checkpoint, variant, "mixed", 1)
    original = shutil.copytree(checkpoint, tmp_path / "original")
    (file,) = (original / "transformer").glob("*.safetensors")
    state = load_file(file)
    config = json.loads((original / "transformer" / "config.json").read_text())
    names = diffusers_names(original_keys(config))
    assert set(names.values()) == set(state)
    save_file({f"model.{key}": state[name] for key, name in names.items()}, original / "wan.safetensors")
    file.unlink()
    convert(ConvertRequest(original, tmp_path / "artifact", dtypes, threads=2))
    assert_equals_naive(tmp_path / "artifact", checkpoint, all_float32=bool(dtypes))


@pytest.mark.slow
def test_large_layouts_equal_the_naive_conversion(
    toy_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk file per layer, large arrays split, and several blocks a row: what published sizes have."""
    monkeypatch.setattr(layout_module, "SMALL_BYTES", 0)
    monkeypatch.setattr(layout_module, "LARGE_BYTES", 2000)
    monkeypatch.setattr(writer_module, "BLOCK_ITEMS", 100)
    manifest = convert(ConvertRequest(toy_checkpoint, tmp_path / "artifact"))
    transformer, text = (manifest.components[name].parameters for name in ("transformer", "text_encoder"))
    assert transformer["blocks/ffn/up/weight"].layout.chunks == 3
    assert text["shared"].layout.chunks > 3
    assert_equals_naive(tmp_path / "artifact", toy_checkpoint, all_float32=False)


def test_the_manifest_says_what_was_converted(toy_artifact: Path, toy_checkpoint: Path) -> None:
    manifest = read_manifest(toy_artifact)
    for name in COMPONENTS:
        config = json.loads((toy_checkpoint / name / "config.json").read_text())
        assert manifest.configs[name] == config
        assert manifest.components[name].folder == f"weights/{name}"
    tokenizer = toy_artifact / manifest.tokenizer.file
    assert tokenizer.read_bytes() == (toy_checkpoint / "tokenizer" / "tokenizer.json").read_bytes()
    assert set(manifest.source["files"]) >= {f"{name}/config.json" for name in COMPONENTS}


# --- the same source, the same artifact -------------------------------------------------------------------


def checksums(manifest: Manifest) -> dict[str, Any]:
    return dict(manifest.components)


@pytest.fixture(scope="module")
def converted(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with the default dtypes, one thread. Not to be changed."""
    artifact = tmp_path_factory.mktemp("converted") / "artifact"
    convert(ConvertRequest(toy_checkpoint, artifact, threads=1))
    return artifact


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_conversion_is_deterministic(converted: Path, toy_checkpoint: Path, tmp_path: Path) -> None:
    """With other threads, from another place and into another place: the same bytes, but for the times."""
    elsewhere = shutil.copytree(toy_checkpoint, tmp_path / "a" / "copied checkpoint")
    convert(ConvertRequest(elsewhere, tmp_path / "other", threads=3))
    first, second = read_manifest(converted), read_manifest(tmp_path / "other")
    assert checksums(first) == checksums(second)
    assert first.content_digest == second.content_digest
    files, others = files_of(converted), files_of(tmp_path / "other")
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


def set_weight(checkpoint: Path, component: str, key: str, value: float) -> None:
    (file,) = (checkpoint / component).glob("*.safetensors")
    state = load_file(file)
    state[key].reshape(-1)[-1] = value
    save_file(state, file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("component", "key", "value"),
    [
        ("transformer", "blocks.2.ffn.net.0.proj.weight", float("nan")),
        ("transformer", "blocks.1.norm2.bias", float("-inf")),
        ("text_encoder", "shared.weight", 3.4e38),  # finite, and infinite in bfloat16
        ("vae", "decoder.conv_out.bias", float("inf")),
    ],
)
def test_a_value_that_is_not_finite(
    toy_checkpoint: Path, converted: Path, tmp_path: Path, component: str, key: str, value: float
) -> None:
    """It is refused by name, and a forced conversion leaves the artifact that was there."""
    checkpoint = shutil.copytree(toy_checkpoint, tmp_path / "checkpoint")
    set_weight(checkpoint, component, key, value)
    artifact = shutil.copytree(converted, tmp_path / "artifact")
    before = files_of(artifact)
    with refuses("not_finite", SourceError, what=f"{component}: {key} ") as caught:
        convert(ConvertRequest(checkpoint, artifact, force=True))
    assert caught.value.exit_code == 4
    assert files_of(artifact) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "checkpoint"]


def test_all_misfits_are_listed(toy_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(toy_checkpoint, tmp_path / "checkpoint")
    for component, dropped in (("transformer", "blocks.1.norm2.bias"), ("vae", "decoder.conv_in.weight")):
        (file,) = (checkpoint / component).glob("*.safetensors")
        state = load_file(file)
        state[f"{dropped}_old"] = state.pop(dropped)
        save_file(state, file)
    with refuses("mismatch", SourceError, what=checkpoint) as caught:
        convert(ConvertRequest(checkpoint, tmp_path / "artifact"))
    for part in (
        "key blocks.1.norm2.bias_old",
        "key for blocks/norm2/bias",
        "key decoder.conv_in.weight_old",
        "key for decoder/conv_in/weight",
    ):
        assert part in caught.value.what
    assert list(tmp_path.iterdir()) == [checkpoint]
