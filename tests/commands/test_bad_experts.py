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
from helpers.refusals import check_json
from wanbuild.cli import wanbuild
from wanbuild.toy.toy_checkpoint import write_toy
from wancli.console import run

WEIGHTS = "diffusion_pytorch_model.safetensors"
WAN = ["diffusers", "WanTransformer3DModel"]

Converts = Callable[..., dict[str, Any]]
Parts = dict[str, Any]
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
    """Converts, which has to fail with one error and leave every file and folder as it was."""

    def call(source: Path, error: str, *options: str, **parts: object) -> dict[str, Any]:
        before = everything(tmp_path)
        capsys.readouterr()
        arguments = ["convert", str(source), "--artifact", str(tmp_path / "artifact"), *options]
        assert run(wanbuild, [*arguments, "--json-errors"]) == 4
        output = capsys.readouterr()
        assert everything(tmp_path) == before and output.out == ""
        return check_json(output.err, error, **parts)

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
BOTH = ("boundary_ratio", "transformer_2")
NEITHER: Parts = {"message": BOTH, "found": ("0.875", "no transformer_2"), "remedy": "check"}
A_NUMBER: Parts = {"message": "boundary_ratio", "expected": "0 to 1", "remedy": "model_index.json"}
MISSING = "missing_file"

CASES: dict[str, tuple[str, Change, str, Parts]] = {
    # One of the two facts that make two experts.
    "a boundary and no entry": ("wan2.2-t2v", NO_SECOND, "conflict", NEITHER),
    "a boundary and an entry of null": (
        "wan2.2-t2v",
        index(transformer_2=[None, None]),
        "conflict",
        NEITHER,
    ),
    "a boundary and one transformer": (
        "wan2.1-t2v",
        index(boundary_ratio=0.875),
        "conflict",
        NEITHER,
    ),
    "experts and no boundary": (
        "wan2.2-t2v",
        index(boundary_ratio=...),
        "conflict",
        {"message": BOTH, "found": "no boundary_ratio", "remedy": "published"},
    ),
    "experts and a boundary of null": (
        "wan2.2-t2v",
        index(boundary_ratio=None),
        "conflict",
        {"message": BOTH},
    ),
    "an expert that is not listed": (
        "wan2.2-t2v",
        both(NO_SECOND, index(boundary_ratio=...)),
        "mismatch",
        {"message": ("transformer_2", "model_index.json"), "remedy": "folder"},
    ),
    # A boundary that is no share of the timesteps.
    **{
        f"a boundary of {value!r}": ("wan2.2-t2v", index(boundary_ratio=value), "wrong_type", A_NUMBER)
        for value in (-0.1, -1, 1.0001, 875, float("nan"), float("inf"), -1e-300, "0.875", True, [0.9], {})
    },
    # An expert that is missing.
    "no folder of the low-noise expert": (
        "wan2.2-t2v",
        without("transformer_2"),
        MISSING,
        {"message": "/transformer_2 ", "remedy": "download"},
    ),
    "no weights of the low-noise expert": (
        "wan2.2-t2v",
        without(f"transformer_2/{WEIGHTS}"),
        MISSING,
        {"message": "/transformer_2 ", "remedy": "download"},
    ),
    "no config of the low-noise expert": (
        "wan2.2-t2v",
        without("transformer_2/config.json"),
        MISSING,
        {"message": "transformer_2/config.json"},
    ),
    "no folder of the high-noise expert": (
        "wan2.2-t2v",
        without("transformer"),
        MISSING,
        {"message": "/transformer ", "remedy": "download"},
    ),
    "the low-noise expert alone": (
        "wan2.2-t2v",
        both(without("transformer"), index(transformer=[None, None])),
        "unsupported",
        {"message": "transformer is missing", "expected": "wan2.2-t2v"},
    ),
    "one file beside two experts": (
        "wan2.2-t2v",
        lambda source: (source / "transformer_2" / WEIGHTS).rename(source / WEIGHTS),
        MISSING,
        {"message": "/transformer_2 "},
    ),
    # Experts that differ.
    "experts of different configs": (
        "wan2.2-t2v",
        config("transformer_2", eps=1e-5, rope_max_seq_len=512),
        "mismatch",
        {
            "message": "transformer_2/config.json",
            "expected": ("eps 1e-06", "rope_max_seq_len 1024"),
            "found": ("eps 1e-05", "rope_max_seq_len 512"),
            "remedy": "both transformers",
        },
    ),
    "experts of different shapes": (
        "wan2.2-t2v",
        tensors("transformer_2", lambda s: s.update({"proj_out.bias": s["proj_out.bias"][:-4]})),
        "mismatch",
        {"message": ("transformer_2: ", "proj_out.bias", "[60]", "[64]")},
    ),
    "an expert without a tensor": (
        "wan2.2-t2v",
        tensors("transformer_2", lambda s: s.pop("blocks.1.attn1.to_k.weight")),
        "mismatch",
        {"message": ("transformer_2: ", "blocks/attn1/to_k/weight", "1")},
    ),
    "an expert that is not finite": (
        "wan2.2-t2v",
        tensors("transformer_2", lambda s: s.update({"proj_out.bias": np.full(64, np.nan, np.float32)})),
        "not_finite",
        {"message": "transformer_2: proj_out.bias"},
    ),
    # A timestep per token, and the VAE that it comes with.
    "a timestep per token with the VAE of 2.1": (
        "wan2.1-t2v",
        index(expand_timesteps=True),
        "unsupported",
        {"message": ("wan2.1-t2v: expand_timesteps", "wan2.2-ti2v: vae patch_size")},
    ),
    "a timestep per token with two experts": (
        "wan2.2-t2v",
        index(expand_timesteps=True),
        "unsupported",
        {"message": ("wan2.2-t2v: expand_timesteps", "True")},
    ),
    "one timestep with the VAE of 2.2": (
        "wan2.2-ti2v",
        index(expand_timesteps=...),
        "unsupported",
        {"message": ("wan2.2-ti2v: expand_timesteps", "False")},
    ),
    "a timestep per token of another type": (
        "wan2.2-ti2v",
        index(expand_timesteps="yes"),
        "wrong_type",
        {"message": "expand_timesteps", "found": "'yes'"},
    ),
    "two experts with the VAE of 2.2": (
        "wan2.2-t2v",
        config("vae", patch_size=2, z_dim=48),
        "unsupported",
        {"message": ("vae patch_size", "out_channels", "48")},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "change", "error", "parts"), CASES.values(), ids=CASES)
def test_a_checkpoint_of_2_2_that_cannot_be_used(
    refused: Converts,
    toys: dict[str, Path],
    tmp_path: Path,
    variant: str,
    change: Change,
    error: str,
    parts: Parts,
) -> None:
    source = Path(shutil.copytree(toys[variant], tmp_path / "source"))
    change(source)
    refused(source, error, **parts)


@pytest.mark.parametrize(("variant", "other"), [("wan2.2-ti2v", "wan2.1-t2v"), ("wan2.1-t2v", "wan2.2-ti2v")])
def test_the_vae_of_another_variant(
    refused: Converts, toys: dict[str, Path], tmp_path: Path, variant: str, other: str
) -> None:
    source = Path(shutil.copytree(toys[variant], tmp_path / "source"))
    shutil.rmtree(source / "vae")
    shutil.copytree(toys[other] / "vae", source / "vae")
    refused(source, "unsupported", message=(f"{variant}: vae patch_size", "vae z_dim"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"num_layers": 3}, {"num_layers": 4}),
        ({"ffn_dim": 56, "freq_dim": 64}, {"ffn_dim": 44, "freq_dim": 32}),
    ],
)
def test_whole_experts_of_different_sizes(
    refused: Converts, tmp_path: Path, first: dict[str, int], second: dict[str, int]
) -> None:
    write_toy(tmp_path / "source", "wan2.2-t2v", configs={"transformer_2": second})
    expected, found = (tuple(f"{name} {size}" for name, size in sizes.items()) for sizes in (first, second))
    refused(tmp_path / "source", "mismatch", expected=expected, found=found)


@pytest.mark.slow
def test_an_artifact_is_not_replaced_by_half_a_model(
    refused: Converts, toys: dict[str, Path], tmp_path: Path
) -> None:
    arguments = ["convert", str(toys["wan2.2-t2v"]), "--artifact", str(tmp_path / "artifact")]
    assert run(wanbuild, arguments) == 0
    source = Path(shutil.copytree(toys["wan2.2-t2v"], tmp_path / "source"))
    without("transformer_2")(source)
    refused(source, "missing_file", "--force", message="/transformer_2 ")


@pytest.mark.slow
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
