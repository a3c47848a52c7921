"""Checkpoints of files, given one by one, all in one or in shards: the same artifact, or one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoint_files import save_file
from helpers.hub_server import read_folder
from helpers.refusals import check_refusal, json_error, refuses
from helpers.single_files import (
    ALL_IN_ONE,
    original_transformer,
    original_vae,
    write_all_in_one,
    write_single_files,
    write_with_published_heads,
)
from wanbuild.build import convert
from wanbuild.cli import wanbuild
from wanbuild.components import kind_of
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.plan import subject
from wanbuild.recipe import fingerprint, read_recipe
from wanbuild.source.all_in_one import all_in_one, prefix_of_part
from wanbuild.source.checkpoint import open_source
from wanbuild.source.checkpoint_parts import OPTIONS
from wanbuild.source.recognise import no_checkpoint
from wanbuild.source.shards import weights_at
from wanbuild.source.single_files import open_files
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.toy.toy_weights import Stored
from wanbuild.variants.table import MODULES
from wancli.console import run
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.errors import SourceError

_NOT_ALONE = ("wan2.2-animate", "self-forcing-wan2.1", "helios-mid-wan2.1", "helios-distilled-wan2.1")

ALONE = [name for name in MODULES if name not in _NOT_ALONE]
"""Animate's motion encoder is of one published size, too large for a toy; Self-Forcing's are T2V's. Helios'
other models differ from its Base by their scheduler alone."""


def assert_same(found: Manifest, expected: Manifest, artifacts: Path) -> None:
    """Two artifacts have the same bytes but for what says where they are from."""
    for part in ("weights", "tokenizer"):
        one, other = (read_folder(artifacts / name / part) for name in ("one", "other"))
        assert one == other and len(one) >= (50 if part == "weights" else 1)
    assert found.model == expected.model
    assert found.components == expected.components
    for name, config in expected.configs.items():
        if name != "scheduler":  # as published, with fields that have their defaults
            kind = kind_of(name, config.get("_class_name"))
            assert kind.parse(found.configs[name], "x") == kind.parse(config, "x")


# --- the same artifact -------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ALONE)
def test_files_alone_make_the_same_artifact(variant: str, tmp_path: Path) -> None:
    """Class, configs, boundary, scheduler and preprocessing follow from the tensors and what is published."""
    write_with_published_heads(tmp_path / "checkpoint", variant)
    _as_published(tmp_path / "checkpoint", variant)
    files = write_single_files(tmp_path / "checkpoint", tmp_path / "files", "model.diffusion_model.")
    expected = convert(ConvertRequest(tmp_path / "checkpoint", tmp_path / "one"))
    found = convert(ConvertRequest(None, tmp_path / "other", files=files))
    assert_same(found, expected, tmp_path)
    names = {f"{name}/{path.name}" for name, path in files.items() if name != "tokenizer"}
    names |= {"tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"}
    assert found.source["repository"] is None
    assert found.source["files"].keys() == names


def _as_published(checkpoint: Path, variant: str) -> None:
    """Gives a toy the published shift, and the published way to prepare images for its encoder."""
    from wanbuild.variants.table import variants

    scheduler = checkpoint / "scheduler" / "scheduler_config.json"
    config = json.loads(scheduler.read_text())
    config["shift" if "shift" in config else "flow_shift"] = variants()[variant].flow_shift
    scheduler.write_text(json.dumps(config))
    processor = checkpoint / "image_processor" / "preprocessor_config.json"
    if processor.exists():
        config = json.loads(processor.read_text())
        config["size"] = {"shortest_edge": config["crop_size"]["height"]}
        processor.write_text(json.dumps(config))


@pytest.mark.thorough
def test_one_file_takes_the_place_of_a_part(tmp_path: Path) -> None:
    """Animate's keys and values are one tensor in the original; the checkpoint's config says the sizes."""
    channels = {str(4 << power): 4 for power in range(8)}
    sizes = {"motion_encoder_size": 512, "motion_encoder_channel_sizes": channels}
    write_toy(tmp_path / "checkpoint", "wan2.2-animate", configs={"transformer": sizes})
    file = tmp_path / "animate.safetensors"
    save_file(original_transformer(tmp_path / "checkpoint" / "transformer"), file)
    expected = convert(ConvertRequest(tmp_path / "checkpoint", tmp_path / "one"))
    for weights in (tmp_path / "checkpoint" / "transformer").glob("*.safetensors"):
        weights.unlink()
    request = ConvertRequest(tmp_path / "checkpoint", tmp_path / "other", files={"transformer": file})
    found = convert(request)
    assert_same(found, expected, tmp_path)
    assert "transformer/animate.safetensors" in found.source["files"]


@pytest.mark.slow
def test_options_and_recipes_name_the_files(
    text_files: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    options = [word for name, path in text_files.items() for word in (OPTIONS[name], str(path))]
    assert run(wanbuild, ["convert", "--artifact", str(tmp_path / "artifact"), *options]) == 0
    recognised, assumed, otherwise, converted = capsys.readouterr().out.splitlines()
    assert converted.startswith(f"converted {text_files['transformer']} to {tmp_path}/artifact: ")
    assert " wan2.1-t2v: " in recognised and len(re.findall(r" \d+ ", recognised)) == 2
    facts = assumed.partition(": ")[2]
    assert re.findall(r" \d+", facts) == [" 128", " 5"] and "UniPC" in facts
    assert "--config FOLDER" in otherwise
    assert run(wanbuild, ["inspect", str(tmp_path / "artifact")]) == 0
    assert facts in capsys.readouterr().out
    recipe = tmp_path / "recipe.toml"
    lines = [f'{name} = "{path}"' for name, path in text_files.items()]
    recipe.write_text("\n".join(['artifact = "other"', "[convert]", *lines]))
    with open_files(text_files) as source:
        assert source.pipeline_class == "WanPipeline" and source.boundary_ratio is None
    planned = ["plan", str(recipe), "--target", "h200", "--size", "96x64"]
    assert run(wanbuild, planned) == 0
    assert "recipe, 96x64x81" in capsys.readouterr().out


# --- what does not fit -------------------------------------------------------------------------------------


def test_missing_parts_are_named(text_files: Mapping[str, Path]) -> None:
    with refuses("missing_parameter", found="--vae, no --tokenizer", remedy="tokenizer"):
        open_files({name: text_files[name] for name in ("transformer", "text_encoder")})


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in place of a part"])
@pytest.mark.parametrize(
    ("part", "other", "found", "option"),
    [
        ("text_encoder", "vae", "the VAE of Wan", "--vae"),
        ("vae", "text_encoder", "the text encoder", "--text-encoder"),
        ("transformer", "vae", "the VAE of Wan", "--vae"),
        ("transformer", "lora", "a LoRA", "--lora"),
    ],
)
def test_a_part_of_another_kind(
    part: str,
    other: str,
    found: str,
    option: str,
    alone: bool,
    text_files: Mapping[str, Path],
    text_checkpoint: Path,
    tmp_path: Path,
) -> None:
    """The line names the file and what it is, whatever SOURCE is."""
    save_file({"diffusion_model.blocks.0.self_attn.q.lora_down.weight": np.ones((2, 2))}, tmp_path / "lora")
    file = text_files.get(other, tmp_path / "lora")
    files = {**text_files, part: file} if alone else {part: file}
    request = ConvertRequest(None if alone else text_checkpoint, tmp_path / "a", files=files)
    named = {"what": f"{file} is {found}", "expected": f"the {part.replace('_', ' ')}", "remedy": option}
    with refuses("wrong_kind", SourceError, **named):
        convert(request)


def test_a_part_of_another_model(text_checkpoint: Path, tmp_path: Path) -> None:
    """Its config is SOURCE's, which it does not fit: the line names the file, not SOURCE."""
    write_with_published_heads(tmp_path / "checkpoint", "wan2.2-ti2v")
    save_file(original_vae(tmp_path / "checkpoint" / "vae"), file := tmp_path / "vae.safetensors")
    with refuses("mismatch", SourceError, what=f"{file} ({text_checkpoint}/vae/config.json): "):
        convert(ConvertRequest(text_checkpoint, tmp_path / "a", files={"vae": file}))


def test_parts_of_different_models(text_files: Mapping[str, Path], tmp_path: Path) -> None:
    write_with_published_heads(tmp_path / "checkpoint", "wan2.2-ti2v")
    save_file(original_vae(tmp_path / "checkpoint" / "vae"), tmp_path / "vae.safetensors")
    files = {**text_files, "vae": tmp_path / "vae.safetensors"}
    with refuses("unsupported", SourceError, what="wan2.2-ti2v: transformer out_channels") as caught:
        open_files(files)
    assert {"16,", "48"} <= set(caught.value.what.split())
    assert all(f"--{name} {files[name]}" in str(caught.value.found) for name in ("transformer", "vae"))


def test_the_settings_of_two_experts(text_files: Mapping[str, Path]) -> None:
    with open_files({**text_files, "transformer_2": text_files["transformer"]}) as source:
        assert source.boundary_ratio == 0.875
        assert source.scheduler_config["flow_shift"] == 12


def test_a_part_that_the_checkpoint_does_not_have(
    text_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    command = ["convert", str(text_checkpoint), "--artifact", str(tmp_path / "a"), "--image-encoder", "x"]
    assert run(wanbuild, [*command, "--json-errors"]) == 2
    error = json_error(capsys.readouterr().err)
    assert error["code"] == "unknown_name" and "--image-encoder" in error["message"]


def test_nothing_to_convert(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(wanbuild, ["convert", "--artifact", str(tmp_path / "a"), "--json-errors"]) == 2
    error = json_error(capsys.readouterr().err)
    assert error["code"] == "missing_parameter" and "SOURCE" in error["expected"]


# --- all in one file, as of ComfyUI ---


@pytest.fixture(scope="session")
def whole(text_files: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "wan-all-in-one.safetensors"
    write_all_in_one(text_files, path)
    return path


@pytest.mark.slow
def test_one_file_is_a_checkpoint(
    whole: Path, text_files: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = ["--tokenizer", str(text_files["tokenizer"])]
    command = ["convert", str(whole), "--artifact", str(tmp_path / "one"), *tokenizer]
    assert run(wanbuild, command) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("recognised wan2.1-t2v") and said[-1].startswith(f"converted {whole} to ")
    manifest = read_manifest(tmp_path / "one")
    names = {f"{part}/{whole.name}" for part in ALL_IN_ONE}
    assert {name for name in manifest.source["files"] if "safetensors" in name} == names
    digests = {manifest.source["files"][name]["digest"] for name in names}
    assert len(digests) == 3  # each of its own tensors
    parts = {**dict.fromkeys(ALL_IN_ONE, whole), "tokenizer": text_files["tokenizer"]}
    with open_files(parts) as found, open_files(text_files) as expected:
        for name in ALL_IN_ONE:
            one, other = found.component(name), expected.component(name)
            assert one.config == other.config and one.tensors.keys() == other.tensors.keys()
            assert all(np.array_equal(one.array(key), other.array(key)) for key in one.tensors)


def test_what_is_missing_is_named_and_its_tokenizer_is_not_read(
    whole: Path, text_files: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.safetensors"
    write_all_in_one(
        text_files, path, {"transformer": ALL_IN_ONE["transformer"], "vae": "first_stage_model."}
    )
    for source, found in ((path, "no --text-encoder, no --tokenizer"), (whole, "no --tokenizer")):
        command = ["convert", str(source), "--artifact", str(tmp_path / "a"), "--json-errors"]
        assert run(wanbuild, command) == 2
        error = json_error(capsys.readouterr().err)
        assert (error["code"], error["found"]) == ("missing_parameter", found)
        assert "--tokenizer google/umt5-xxl" in error["remedy"]
        assert ("SentencePiece" in error["remedy"]) == (source == whole)
    with refuses("wrong_kind", SourceError, what=f"{path} ", expected="one text encoder"):
        open_files({**text_files, "text_encoder": path})


def test_a_short_prefix_may_be_the_start_of_another_s_names() -> None:
    keys = ["model.diffusion_model.a", "model.other.b", "vae.c"]
    assert prefix_of_part(keys, "transformer", Path("x")) == "model.diffusion_model."


def test_unknown_prefixes(text_files: Mapping[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    state = write_all_in_one(text_files, path)
    save_file({**state, "clip_g.x.weight": np.ones(2, np.float32)}, path)
    with refuses("wrong_kind", SourceError, what="clip_g.x.weight", expected="vae.", remedy="--vae FILE"):
        all_in_one(path)
    with open_files({**text_files, "vae": path}) as source:  # only this part is read
        assert source.component("vae").tensors
    save_file({**state, "first_stage_model.x": np.ones(2, np.float32)}, path)
    with refuses("wrong_kind", SourceError, expected="one vae", found="first_stage_model. and vae."):
        open_files({**text_files, "vae": path})


def test_other_sources_are_none(whole: Path, text_files: Mapping[str, Path], tmp_path: Path) -> None:
    assert all_in_one(None) == all_in_one(tmp_path) == all_in_one("owner/name") == {}
    assert all(all_in_one(text_files[name]) == {} for name in ALL_IN_ONE)
    error = no_checkpoint(whole)  # where a folder is needed
    check_refusal(error, "wrong_kind", what=whole, remedy=f"wanbuild convert {whole} ")
    assert all(name in error.what for name in ALL_IN_ONE)


def test_a_recipe_s_model_is_known_before_it_is_converted(
    whole: Path, text_files: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the tokenizer of a hub's repository."""
    monkeypatch.setattr(subject, "locate_tokenizer", lambda place: text_files["tokenizer"])
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'source = "{whole}"\nartifact = "a"\n[convert]\ntokenizer = "google/umt5-xxl"\n')
    model = subject.model_of(read_recipe(recipe))
    assert model is not None and model.manifest.model.variant == "wan2.1-t2v"


def test_a_revision_is_of_a_hub_s_repository(whole: Path, tmp_path: Path) -> None:
    with refuses("no_effect", what=whole):
        convert(ConvertRequest(whole, tmp_path / "a", revision="main"))


# --- a part in shards: a folder or an index is taken wherever a file is ---

INDEXES = {
    "transformer": "diffusion_pytorch_model.safetensors.index.json",
    "text_encoder": "model.safetensors.index.json",
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy in three shards a component. Not to be changed."""
    folder = tmp_path_factory.mktemp("sharded") / "checkpoint"
    write_toy(folder, stored=Stored(shards=3))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", ["folder", "index", "checkpoint"])
def test_shards_are_a_part(way: str, sharded: Path, tmp_path: Path) -> None:
    """Their config.json comes with them: heads of a toy do not follow from its shapes."""
    parts = [name for name in OPTIONS if (sharded / name).is_dir()]
    files = {name: sharded if way == "checkpoint" else sharded / name for name in parts}
    files["tokenizer"] = sharded / "tokenizer"
    if way == "index":
        files |= {name: sharded / name / file for name, file in INDEXES.items()}
    found = convert(ConvertRequest(None, tmp_path / "one", files=files))
    expected = convert(ConvertRequest(sharded, tmp_path / "other"))
    assert found.components == expected.components
    assert sum(name.endswith("-of-00003.safetensors") for name in found.source["files"]) == 6
    replaced = {"transformer": files["transformer"]}
    again = convert(ConvertRequest(sharded, tmp_path / "again", files=replaced))
    assert again.components == expected.components


def test_wan_s_own_repositories(sharded: Path, tmp_path: Path) -> None:
    """Two of their parts are pickles; the line says how to give the experts' folders."""
    for name in ("high_noise_model", "low_noise_model"):
        (tmp_path / name).symlink_to(sharded / "transformer")
    (tmp_path / "Wan2.1_VAE.pth").touch()
    given = f"--transformer {tmp_path}/high_noise_model --transformer-2 {tmp_path}/low_noise_model"
    with refuses("untrusted", SourceError, remedy=given):
        open_source(tmp_path)
    assert weights_at("transformer", tmp_path / "high_noise_model").name == INDEXES["transformer"]


def test_one_shard_is_no_part(sharded: Path, tmp_path: Path) -> None:
    shard = sharded / "transformer" / "diffusion_pytorch_model-00001-of-00003.safetensors"
    with refuses("wrong_kind", SourceError, what=shard, remedy=shard.parent):
        convert(ConvertRequest(sharded, tmp_path / "a", files={"transformer": shard}))
    assert f"--transformer {shard.parent} " in str(no_checkpoint(shard))


def test_a_recipe_sees_that_a_shard_changed(sharded: Path, tmp_path: Path) -> None:
    shutil.copytree(sharded / "transformer", tmp_path / "shards")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'source = "{sharded}"\nartifact = "a"\n[convert]\ntransformer = "shards/{INDEXES["transformer"]}"\n'
    )
    before = fingerprint(read_recipe(recipe))
    (tmp_path / "shards" / "diffusion_pytorch_model-00002-of-00003.safetensors").touch()
    assert fingerprint(read_recipe(recipe)) != before


def test_an_index_of_shards_of_another_name(sharded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    shutil.copytree(sharded / "transformer", folder)
    (folder / INDEXES["transformer"]).rename(folder / "wan2.1_t2v.safetensors.index.json")
    assert weights_at("transformer", folder).name == "wan2.1_t2v.safetensors.index.json"
