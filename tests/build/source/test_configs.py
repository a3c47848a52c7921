"""Configs that the user gives take the place of assumed ones and of a checkpoint's, or end in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.original_checkpoint import original_config
from helpers.refusals import refuses
from hostile.refusal import check_named
from wanbuild.check.given_configs import with_given_configs
from wanbuild.cli import wanbuild
from wanbuild.recipe import fingerprint, read_recipe
from wanbuild.source.checkpoint import open_source
from wanbuild.source.configs import parse_configs, scheduler_left
from wanbuild.source.shapes import component_shapes
from wanbuild.source.single_files import open_files
from wanbuild.toy.toy_configs import TOY_TRANSFORMER
from wancli.console import run
from wanrun.artifact.manifest import TRANSFORMERS, read_manifest
from wanrun.codes import ErrorCode
from wanrun.errors import SourceError, UsageError
from wanrun.files import sha256_of

EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 7.0}


def written(folder: Path, checkpoint: Path, part: str, **changes: Any) -> Path:
    """Writes a config of the checkpoint with changes."""
    name = "scheduler_config.json" if part == "scheduler" else "config.json"
    (folder / part).mkdir(parents=True, exist_ok=True)
    config = json.loads((checkpoint / part / name).read_text())
    (folder / part / name).write_text(json.dumps({**config, **changes}))
    return folder / part / name


@pytest.fixture
def configs(text_checkpoint: Path, tmp_path: Path) -> Path:
    """A folder of configs: four heads of 64, other latents, and another solver."""
    folder = tmp_path / "configs"
    written(folder, text_checkpoint, "transformer", num_attention_heads=4, attention_head_dim=64)
    written(folder, text_checkpoint, "vae", latents_std=[2.0] * 16)
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(EULER))
    return folder


@pytest.mark.slow
def test_what_is_given_is_not_assumed(
    configs: Path,
    text_checkpoint: Path,
    text_files: Mapping[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [w for name, path in text_files.items() for w in (f"--{name.replace('_', '-')}", str(path))]
    artifact = tmp_path / "artifact"
    command = ["convert", "--artifact", str(artifact), *options, "--config", str(configs)]
    assert run(wanbuild, command) == 0
    recognised, converted = capsys.readouterr().out.splitlines()
    assert recognised.endswith("layers with 4 heads") and converted.startswith("converted ")
    manifest = read_manifest(artifact)
    assert manifest.model.default_options()["solver"] == "euler"
    assert manifest.model.default_options()["flow_shift"] == 7
    assert manifest.configs["transformer"]["attention_head_dim"] == 64
    assert manifest.configs["vae"]["latents_std"] == [2.0] * 16
    names = {
        "scheduler": "scheduler/scheduler_config.json",
        "transformer": "transformer/config.json",
        "vae": "vae/config.json",
    }
    assert manifest.source["configs"] == names and "assumed" not in manifest.source
    for name in names.values():
        digest = sha256_of((configs / name).read_bytes())
        assert manifest.source["files"][name]["digest"] == f"sha256:{digest}"
    assert run(wanbuild, ["inspect", str(artifact)]) == 0
    assert f"configs given   {', '.join(names.values())}" in capsys.readouterr().out
    # What verify --source compares with has the same configs, and the checkpoint's weights.
    with with_given_configs(text_checkpoint, manifest) as folder, open_source(folder) as source:
        assert source.component("transformer").config["num_attention_heads"] == 4
        assert source.component("vae").config["latents_std"] == [2.0] * 16
        assert source.scheduler_config == EULER
    assert not folder.exists()


def test_the_rest_stays_assumed(
    configs: Path, text_checkpoint: Path, text_files: Mapping[str, Path], tmp_path: Path
) -> None:
    euler = {"scheduler": tmp_path / "euler.json"}
    euler["scheduler"].write_text(json.dumps({"_class_name": EULER["_class_name"]}))
    with open_files(text_files, euler) as source:
        heads, latents = source.assumed
        assert heads.startswith("heads") and latents.startswith("the VAE")
    original = tmp_path / "wan.json"  # as Wan's own repositories have it
    config = json.loads((configs / "transformer" / "config.json").read_text())
    original.write_text(json.dumps(original_config(config)))
    both = {**text_files, "transformer_2": tmp_path / "low.safetensors"}
    shutil.copy(text_files["transformer"], both["transformer_2"])
    with open_files(both, {"transformer": original}) as source:  # of both experts
        heads = [source.component(name).config["num_attention_heads"] for name in TRANSFORMERS]
        assert heads == [4, 4] and any("boundary 0.875 " in one for one in source.assumed)


def test_the_scheduler_of_a_whole_checkpoint(
    configs: Path, text_checkpoint: Path, text_files: Mapping[str, Path], tmp_path: Path
) -> None:
    """Given as the transformer, it brings it where none is known; a source's stays, and this is told."""
    other = shutil.copytree(text_checkpoint, tmp_path / "other")
    shutil.copy(configs / "scheduler" / "scheduler_config.json", other / "scheduler")
    files = {"transformer": Path(other)}
    with open_files({**text_files, **files}) as source:
        assert source.scheduler_config == EULER
        assert not [*scheduler_left(source.given, source.configs, source.scheduler_config)]
    with open_source(text_checkpoint, files=files) as source:
        assert source.scheduler_config != EULER
        (told,) = scheduler_left(source.given, source.configs, source.scheduler_config)
    remedy = parse_configs([told.rpartition("--config ")[2]])
    with open_source(text_checkpoint, files=files, configs=remedy) as source:
        assert source.scheduler_config == EULER
        assert not [*scheduler_left(source.given, source.configs, source.scheduler_config)]
    same = {"transformer": text_checkpoint}
    with open_source(text_checkpoint, files=same) as source:
        assert not [*scheduler_left(source.given, source.configs, source.scheduler_config)]


@pytest.mark.parametrize("changes", [{"_class_name": "AutoencoderKL"}, {"z_dim": 48}])
def test_a_foreign_config_beside_weights(
    changes: dict[str, Any], text_checkpoint: Path, tmp_path: Path
) -> None:
    """It is named, and the remedy's file alone is taken with the config of the source."""
    vae = Path(shutil.copytree(text_checkpoint / "vae", tmp_path / "vae"))
    written(tmp_path, text_checkpoint, "vae", **changes)
    with pytest.raises(SourceError) as raised:
        open_source(text_checkpoint, files={"vae": vae})
    assert raised.value.what.startswith(f"{vae}/config.json")
    assert raised.value.remedy is not None
    alone = Path(raised.value.remedy.rpartition("--vae ")[2])
    with open_source(text_checkpoint, files={"vae": alone}) as source:
        assert source.component("vae").files == (alone,)


def test_configs_of_a_folder_are_replaced(configs: Path, text_checkpoint: Path) -> None:
    """Also of parts that no file replaces."""
    with open_source(text_checkpoint, configs=parse_configs([str(configs)])) as source:
        assert source.component("transformer").config["num_attention_heads"] == 4
        assert source.scheduler_config == EULER and source.assumed == ()
        files = source.files()
        assert files["scheduler/scheduler_config.json"] == configs / "scheduler" / "scheduler_config.json"


def test_a_recipe_names_configs(configs: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('source = "x"\nartifact = "a"\n[convert]\nconfig = "configs"\n')
    read = read_recipe(recipe)
    vae = configs / "vae" / "config.json"
    assert read.configs["vae"] == vae and len(read.configs) == 3
    before = fingerprint(read)
    vae.write_text(vae.read_text() + " ")
    assert fingerprint(read) != before
    recipe.write_text('source = "x"\nartifact = "a"\n[convert]\nconfig = "vae=configs/vae/config.json"\n')
    assert read_recipe(recipe).configs == {"vae": vae}
    recipe.write_text('source = "x"\nartifact = "a"\n[convert]\nconfig = "unet=x"\n')
    with refuses("invalid_value", what="convert.config: --config 'unet=x'", expected="vae"):
        read_recipe(recipe)


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        ("transformer=nowhere.json", "missing_file", ("nowhere.json", "--config")),
        ("transformer=text", "unreadable", ("text",)),
        ("transformer=configs/vae/config.json", "wrong_kind", ("WanTransformer3DModel", "AutoencoderKLWan")),
        ("scheduler=configs/vae/config.json", "wrong_kind", ("UniPC", "AutoencoderKLWan")),
        ("vae=x,vae=y", "conflict", ("x and y",)),
        ("unet=x", "invalid_value", ("transformer, ", "scheduler")),
        ("nowhere", "invalid_value", ("nowhere",)),
        ("empty", "missing_file", ("empty", "transformer/config.json")),
        ("image_encoder=x", "unknown_parameter", ("image_encoder", "--image-encoder FILE")),
        (
            "transformer=layers",
            "conflict",
            ("layers", "[256, 16, 1, 2, 2]", "num_layers 9", "num_attention_heads 3", 256, 64),
        ),
        ("vae=z", "conflict", ("z_dim 16", "z_dim 8")),
    ],
)
def test_what_is_no_config_of_a_part(
    text: str,
    code: ErrorCode,
    named: tuple[object, ...],
    configs: Path,
    text_checkpoint: Path,
    text_files: Mapping[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text").write_text("heads: 4")
    changed = written(configs, text_checkpoint, "transformer", num_layers=9, num_attention_heads=3)
    Path("layers").write_text(json.dumps({**json.loads(changed.read_text()), "attention_head_dim": 64}))
    Path("z").write_text(written(configs, text_checkpoint, "vae", z_dim=8).read_text())
    with pytest.raises((SourceError, UsageError)) as caught:
        open_files(text_files, parse_configs([text]))
    check_named({"code": caught.value.code, "message": str(caught.value)}, code, named)


def test_what_a_config_leaves_out_is_the_default() -> None:
    """As configs of published files do, which an artifact keeps as they are."""
    less = {name: value for name, value in TOY_TRANSFORMER.items() if name != "patch_size"}
    assert len(less) < len(TOY_TRANSFORMER)
    assert component_shapes("transformer", less) == component_shapes("transformer", TOY_TRANSFORMER)
