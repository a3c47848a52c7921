"""A bad Wan 2.2 checkpoint: experts or a VAE that contradict the index or each other; one line says which."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.hostile import everything
from wanbuild.cli import wanbuild
from wanbuild.toy.checkpoint import write_toy
from wancli.console import run

WEIGHTS = "diffusion_pytorch_model.safetensors"
WAN = ["diffusers", "WanTransformer3DModel"]

Converts = Callable[..., str]
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def toys(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A toy of each variant. Not to be changed."""
    folder = tmp_path_factory.mktemp("toys")
    for variant in ("wan2.2-t2v", "wan2.2-ti2v"):
        write_toy(folder / variant, variant)
    return {"wan2.1-t2v": toy_checkpoint, **{path.name: path for path in folder.iterdir()}}


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Converts:
    """Converts, which has to fail with one line and leave every file and folder as it was."""

    def call(source: Path, *options: object, code: int = 4) -> str:
        before = everything(tmp_path)
        capsys.readouterr()
        arguments = ["convert", source, "--artifact", tmp_path / "artifact", *options]
        assert run(wanbuild, [str(argument) for argument in arguments]) == code
        output = capsys.readouterr()
        assert everything(tmp_path) == before and output.out == ""
        (line,) = output.err.splitlines()
        assert line.startswith("error: ") and "internal error" not in line
        return line

    return call


def index(**entries: Any) -> Change:
    """Changes entries of model_index.json; the value ... takes one out."""

    def change(source: Path) -> None:
        path = source / "model_index.json"
        data = {**json.loads(path.read_text()), **entries}
        path.write_text(json.dumps({name: value for name, value in data.items() if value is not ...}))

    return change


def config(component: str, **fields: Any) -> Change:
    def change(source: Path) -> None:
        path = source / component / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def tensors(component: str, edit: Callable[[dict[str, np.ndarray]], object]) -> Change:
    def change(source: Path) -> None:
        path = source / component / WEIGHTS
        state = load_file(path)
        edit(state)
        save_file(state, path)

    return change


def without(name: str) -> Change:
    def change(source: Path) -> None:
        path = source / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def both(*changes: Change) -> Change:
    def change(source: Path) -> None:
        for one in changes:
            one(source)

    return change


NO_SECOND = index(transformer_2=...)
CONTRADICTION = "boundary_ratio and transformer_2 contradict each other"
NEITHER = ["found boundary_ratio 0.875 and no transformer_2", "check that the entry and the folder"]
A_NUMBER = ["boundary_ratio in", "expected a number from 0 to 1", "use the published model_index.json"]

CASES: dict[str, tuple[str, Change, list[str]]] = {
    # One of the two facts that make two experts.
    "a boundary and no entry": ("wan2.2-t2v", NO_SECOND, [CONTRADICTION, *NEITHER]),
    "a boundary and an entry of null": (
        "wan2.2-t2v",
        index(transformer_2=[None, None]),
        [CONTRADICTION, *NEITHER],
    ),
    "a boundary and one transformer": (
        "wan2.1-t2v",
        index(boundary_ratio=0.875),
        [CONTRADICTION, *NEITHER],
    ),
    "experts and no boundary": (
        "wan2.2-t2v",
        index(boundary_ratio=...),
        [CONTRADICTION, "found transformer_2 and no boundary_ratio", "the published one says where"],
    ),
    "experts and a boundary of null": ("wan2.2-t2v", index(boundary_ratio=None), [CONTRADICTION]),
    "an expert that is not listed": (
        "wan2.2-t2v",
        both(NO_SECOND, index(boundary_ratio=...)),
        ["holds transformer_2, which its model_index.json does not list", "move the folder away"],
    ),
    # A boundary that is no share of the timesteps.
    **{
        f"a boundary of {value!r}": ("wan2.2-t2v", index(boundary_ratio=value), A_NUMBER)
        for value in (-0.1, -1, 1.0001, 875, float("nan"), float("inf"), -1e-300, "0.875", True, [0.9], {})
    },
    # An expert that is missing.
    "no folder of the low-noise expert": (
        "wan2.2-t2v",
        without("transformer_2"),
        ["transformer_2 is missing", "download it again"],
    ),
    "no weights of the low-noise expert": (
        "wan2.2-t2v",
        without(f"transformer_2/{WEIGHTS}"),
        ["transformer_2 holds no weights", "download it again"],
    ),
    "no config of the low-noise expert": (
        "wan2.2-t2v",
        without("transformer_2/config.json"),
        ["transformer_2/config.json is missing"],
    ),
    "no folder of the high-noise expert": (
        "wan2.2-t2v",
        without("transformer"),
        ["/transformer is missing", "download it again"],
    ),
    "the low-noise expert alone": (
        "wan2.2-t2v",
        both(without("transformer"), index(transformer=[None, None])),
        ["transformer is missing", "wan2.2-t2v"],
    ),
    "one file beside two experts": (
        "wan2.2-t2v",
        lambda source: (source / "transformer_2" / WEIGHTS).rename(source / WEIGHTS),
        ["transformer_2 holds no weights"],
    ),
    # Experts that differ.
    "experts of different configs": (
        "wan2.2-t2v",
        config("transformer_2", eps=1e-5, rope_max_seq_len=512),
        [
            "transformer_2/config.json differs from",
            "expected eps 1e-06, rope_max_seq_len 1024; found eps 1e-05, rope_max_seq_len 512",
            "check that both transformers are of the same checkpoint",
        ],
    ),
    "experts of different shapes": (
        "wan2.2-t2v",
        tensors("transformer_2", lambda s: s.update({"proj_out.bias": s["proj_out.bias"][:-4]})),
        ["transformer_2: proj_out.bias has shape [60], proj_out/bias needs [64]"],
    ),
    "an expert without a tensor": (
        "wan2.2-t2v",
        tensors("transformer_2", lambda s: s.pop("blocks.1.attn1.to_k.weight")),
        ["transformer_2: missing key for blocks/attn1/to_k/weight, layers 1"],
    ),
    "an expert that is not finite": (
        "wan2.2-t2v",
        tensors("transformer_2", lambda s: s.update({"proj_out.bias": np.full(64, np.nan, np.float32)})),
        ["transformer_2: proj_out.bias has a value that is not finite"],
    ),
    # A timestep per token, and the VAE that it comes with.
    "a timestep per token with the VAE of 2.1": (
        "wan2.1-t2v",
        index(expand_timesteps=True),
        ["not wan2.1-t2v: expand_timesteps is True, not False", "not wan2.2-ti2v: vae patch_size is None"],
    ),
    "a timestep per token with two experts": (
        "wan2.2-t2v",
        index(expand_timesteps=True),
        ["not wan2.2-t2v: expand_timesteps is True, not False"],
    ),
    "one timestep with the VAE of 2.2": (
        "wan2.2-ti2v",
        index(expand_timesteps=...),
        ["not wan2.2-ti2v: expand_timesteps is False, not True"],
    ),
    "a timestep per token of another type": (
        "wan2.2-ti2v",
        index(expand_timesteps="yes"),
        ["expand_timesteps in", "expected true or false; found 'yes'"],
    ),
    "two experts with the VAE of 2.2": (
        "wan2.2-t2v",
        config("vae", patch_size=2, z_dim=48),
        ["vae patch_size is 2, not None", "out_channels is 16, not 48"],
    ),
}


@pytest.mark.parametrize(("variant", "change", "parts"), CASES.values(), ids=CASES)
def test_a_checkpoint_of_2_2_that_cannot_be_used(
    refused: Converts, toys: dict[str, Path], tmp_path: Path, variant: str, change: Change, parts: list[str]
) -> None:
    source = Path(shutil.copytree(toys[variant], tmp_path / "source"))
    change(source)
    line = refused(source)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(("variant", "other"), [("wan2.2-ti2v", "wan2.1-t2v"), ("wan2.1-t2v", "wan2.2-ti2v")])
def test_the_vae_of_another_variant(
    refused: Converts, toys: dict[str, Path], tmp_path: Path, variant: str, other: str
) -> None:
    source = Path(shutil.copytree(toys[variant], tmp_path / "source"))
    shutil.rmtree(source / "vae")
    shutil.copytree(toys[other] / "vae", source / "vae")
    line = refused(source)
    assert f"not {variant}: vae patch_size is" in line and "vae z_dim" in line


@pytest.mark.parametrize(
    ("second", "difference"),
    [
        ({"num_layers": 4}, "expected num_layers 3; found num_layers 4"),
        ({"ffn_dim": 44, "freq_dim": 32}, "expected ffn_dim 56, freq_dim 64; found ffn_dim 44, freq_dim 32"),
    ],
)
def test_whole_experts_of_different_sizes(
    refused: Converts, tmp_path: Path, second: dict[str, int], difference: str
) -> None:
    write_toy(tmp_path / "source", "wan2.2-t2v", configs={"transformer_2": second})
    assert difference in refused(tmp_path / "source")


def test_an_artifact_is_not_replaced_by_half_a_model(
    refused: Converts, toys: dict[str, Path], tmp_path: Path
) -> None:
    arguments = ["convert", str(toys["wan2.2-t2v"]), "--artifact", str(tmp_path / "artifact")]
    assert run(wanbuild, arguments) == 0
    source = Path(shutil.copytree(toys["wan2.2-t2v"], tmp_path / "source"))
    without("transformer_2")(source)
    assert "transformer_2 is missing" in refused(source, "--force")


def test_the_published_forms_are_accepted(toys: dict[str, Path], tmp_path: Path) -> None:
    """What the entries may be left out for, and both ends of the boundary's range."""
    forms: list[tuple[str, Change]] = [
        ("wan2.2-t2v", index(expand_timesteps=False)),
        ("wan2.2-t2v", index(boundary_ratio=0)),
        ("wan2.2-t2v", index(boundary_ratio=1.0, _name_or_path="a/b", image_encoder=[None, None])),
        ("wan2.2-t2v", config("transformer_2", _diffusers_version="0.36.0")),
        ("wan2.2-ti2v", index(transformer_2=..., boundary_ratio=...)),
    ]
    for number, (variant, change) in enumerate(forms):
        source = Path(shutil.copytree(toys[variant], tmp_path / f"source{number}"))
        change(source)
        arguments = ["convert", str(source), "--artifact", str(tmp_path / f"artifact{number}")]
        assert run(wanbuild, arguments) == 0
