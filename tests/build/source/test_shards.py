"""Weights in shards: a folder or an index is taken wherever a file is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.refusals import refuses
from wanbuild.build import convert
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.recipe import fingerprint, read_recipe
from wanbuild.source.checkpoint import open_source
from wanbuild.source.checkpoint_parts import OPTIONS
from wanbuild.source.recognise import no_checkpoint
from wanbuild.source.shards import weights_at
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.toy.toy_weights import Stored
from wanrun.errors import SourceError

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
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path)
    given = f"--transformer {tmp_path}/high_noise_model --transformer-2 {tmp_path}/low_noise_model"
    assert given in str(caught.value)
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


def test_an_index_of_another_name(sharded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    shutil.copytree(sharded / "transformer", folder)
    (folder / INDEXES["transformer"]).rename(folder / "wan2.1_t2v.safetensors.index.json")
    assert weights_at("transformer", folder).name == "wan2.1_t2v.safetensors.index.json"
