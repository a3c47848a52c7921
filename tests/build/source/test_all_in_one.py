"""ComfyUI's all-in-one checkpoints: the same artifact as that of single files, or one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoint_files import save_file
from helpers.refusals import check_refusal, json_error, refuses
from helpers.single_files import ALL_IN_ONE, write_all_in_one
from wanbuild.cli import wanbuild
from wanbuild.plan import subject
from wanbuild.recipe import read_recipe
from wanbuild.source.all_in_one import all_in_one, prefix_of_part
from wanbuild.source.recognise import no_checkpoint
from wanbuild.source.single_files import open_files
from wancli.console import run
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import SourceError


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
    from wanbuild.build import convert
    from wanbuild.conversion.convert_request import ConvertRequest

    with refuses("no_effect", what=whole):
        convert(ConvertRequest(whole, tmp_path / "a", revision="main"))
