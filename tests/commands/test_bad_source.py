"""A bad source, or a bad place to convert to: one clear line, the right exit code, and nothing touched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from wanbuild.cli import wanbuild
from wancli.console import run

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"

Refused = Callable[..., str]


@pytest.fixture
def source(toy_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the toy that a test may break."""
    return Path(shutil.copytree(toy_checkpoint, tmp_path / "source"))


def contents(folder: Path) -> dict[str, str]:
    """Every name below a folder, with the digest of its content."""
    return {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def converted(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact without programs, which no test changes."""
    folder = tmp_path_factory.mktemp("converted") / "artifact"
    assert run(wanbuild, ["convert", str(toy_checkpoint), "--artifact", str(folder)]) == 0
    return folder


@pytest.fixture
def refused(tmp_path: Path, converted: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Refused]:
    """Runs wanbuild, which has to fail with one line and leave every file and folder as it was."""

    def call(code: int, *arguments: object) -> str:
        before = contents(tmp_path), contents(converted.parent)
        capsys.readouterr()
        assert run(wanbuild, [str(argument) for argument in arguments]) == code
        output = capsys.readouterr()
        assert (
            contents(tmp_path),
            contents(converted.parent),
        ) == before  # no artifact, no .building sibling, no lock
        assert output.out == ""
        (line,) = output.err.splitlines()
        assert line.startswith("error: ") and "internal error" not in line
        return line

    yield call


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit_tensors(path: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_missing_folder(refused: Refused, tmp_path: Path) -> None:
    line = refused(4, "convert", tmp_path / "nowhere", "--artifact", tmp_path / "artifact")
    assert f"there is no folder {tmp_path / 'nowhere'}" in line
    assert "give the checkpoint's folder" in line


def test_every_problem_of_the_keys_is_in_one_line(refused: Refused, source: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["blocks.1.attn1.to_k.weight"]
        tensors["blocks.9.attn1.to_k.weight"] = tensors["blocks.0.attn1.to_k.weight"]
        tensors["blocks.0.ffn.net.2.weight"] = tensors["blocks.0.ffn.net.2.weight"][:, :-1]

    edit_tensors(source / TRANSFORMER, change)
    edit_tensors(source / VAE, lambda tensors: tensors.pop("decoder.conv_out.bias"))
    edit_tensors(source / TEXT, lambda tensors: tensors.update(other=np.float32([1, 2])))
    line = refused(4, "convert", source, "--artifact", tmp_path / "artifact")
    for problem in (
        "transformer: missing key for blocks/attn1/to_k/weight, layers 1",
        "transformer: unexpected key blocks.9.attn1.to_k.weight, the config says 3 layers",
        "transformer: blocks.0.ffn.net.2.weight has shape [40, 55], blocks/ffn/down/weight needs [40, 56]",
        "vae: missing key for decoder/conv_out/bias",
        "text_encoder: unexpected key other is not a part of this model",
    ):
        assert problem in line
    assert "check that the download is complete" in line


@pytest.mark.parametrize(
    ("component", "change", "parts"),
    [
        ("transformer", {"window": 7}, ["unknown field window = 7"]),
        ("transformer", {"_class_name": "SD3Transformer2DModel"}, ["WanTransformer3DModel", "SD3"]),
        ("vae", {"base_dim": "wide"}, ["base_dim is 'wide'"]),
        ("text_encoder", {"feed_forward_proj": "relu"}, ["feed_forward_proj is 'relu'", "'gated-gelu'"]),
    ],
)
def test_a_config_that_is_not_understood(
    refused: Refused, source: Path, tmp_path: Path, component: str, change: dict[str, Any], parts: list[str]
) -> None:
    edit_json(source / component / "config.json", lambda data: data.update(change))
    line = refused(4, "convert", source, "--artifact", tmp_path / "artifact")
    assert f"{component}/config.json" in line
    assert all(part in line for part in parts), line


def test_a_pipeline_of_another_class(refused: Refused, source: Path, tmp_path: Path) -> None:
    edit_json(source / "model_index.json", lambda data: data.update(_class_name="FluxPipeline"))
    line = refused(4, "convert", source, "--artifact", tmp_path / "artifact")
    assert "FluxPipeline" in line and "WanPipeline" in line


@pytest.mark.parametrize("kept", [0, 7, 1000, -1])
def test_a_truncated_weight_file(refused: Refused, source: Path, tmp_path: Path, kept: int) -> None:
    file = source / VAE
    file.write_bytes(file.read_bytes()[:kept])
    line = refused(4, "convert", source, "--artifact", tmp_path / "artifact")
    assert f"{file} is cut off" in line and "expected" in line and "download it again" in line


def test_pickled_weights(refused: Refused, source: Path, tmp_path: Path) -> None:
    (source / TRANSFORMER).rename(source / "transformer" / "diffusion_pytorch_model.bin")
    line = refused(4, "convert", source, "--artifact", tmp_path / "artifact")
    assert "diffusion_pytorch_model.bin is a pickled checkpoint, which is never loaded" in line


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        (VAE, "decoder.conv_in.weight", np.nan),  # the last component to be written
        (TRANSFORMER, "blocks.2.ffn.net.0.proj.weight", -np.inf),
        (TRANSFORMER, "patch_embedding.weight", 3.4e38),  # finite, but not in bfloat16
        (TEXT, "shared.weight", np.nan),
    ],
)
def test_weights_that_are_not_finite(
    refused: Refused, source: Path, tmp_path: Path, file: str, key: str, value: float
) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[key] = tensors[key].copy()
        tensors[key].reshape(-1)[-1] = value

    edit_tensors(source / file, change)
    line = refused(4, "convert", source, "--artifact", tmp_path / "artifact")
    assert f"{key} has a value that is not finite" in line
    assert "use an undamaged checkpoint" in line


def test_a_full_disk(refused: Refused, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**6))
    line = refused(4, "convert", source, "--artifact", tmp_path / "artifact")
    assert f"the disk of {tmp_path} is too full" in line
    assert "found 1.00 MB" in line and "free some space" in line


def test_an_existing_artifact_is_kept(refused: Refused, toy_checkpoint: Path, converted: Path) -> None:
    line = refused(2, "convert", toy_checkpoint, "--artifact", converted)
    assert f"the artifact {converted} exists" in line and "pass --force" in line


def test_an_artifact_is_not_replaced_by_a_bad_source(refused: Refused, source: Path, converted: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["decoder.conv_out.bias"] = np.float32([0.1, np.nan, 0.2])

    edit_tensors(source / VAE, change)
    line = refused(4, "convert", source, "--artifact", converted, "--force")
    assert "decoder.conv_out.bias" in line


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_what_is_no_artifact_is_never_replaced(
    refused: Refused, source: Path, tmp_path: Path, force: tuple[str, ...]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("the only copy")
    for existing in (tmp_path / "folder", tmp_path / "folder" / "thesis.txt", source):
        line = refused(2, "convert", source, "--artifact", existing, *force)
        assert f"{existing} exists and is not an artifact" in line and "choose another folder" in line


def test_a_parent_that_does_not_exist(refused: Refused, source: Path, tmp_path: Path) -> None:
    line = refused(2, "convert", source, "--artifact", tmp_path / "missing" / "artifact")
    assert f"parent folder {tmp_path / 'missing'} does not exist" in line and "create it" in line


def test_as_a_user_runs_it(cli: Any, source: Path, tmp_path: Path) -> None:
    """The same through the installed command: one line, no traceback, no progress."""
    edit_json(source / "vae" / "config.json", lambda data: data.update(window=7))
    line = cli.fails(4, "wanbuild", "convert", source, "--artifact", tmp_path / "artifact")
    assert "unknown field window = 7" in line
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--size", "100x64"], ["--size 100x64", "multiples of 16", "use 96x64 or 112x64"]),
        (["--size", "96x56"], ["--size 96x56", "multiples of 16", "use 96x48 or 96x64"]),
        (["--size", "96"], ["'96'", "832x480"]),
        (["--frames", "10"], ["--frames 10", "4n + 1", "use 9 or 13"]),
        (["--frames", "0"], ["--frames 0", "use 1"]),
        (["--num-videos", "0"], ["--num-videos", "x>=1"]),
        (["--target", "v9x:2x4"], ["v9x:2x4", "cpu"]),
        (["--dtype", "float8"], ["float8", "bfloat16"]),
        (["--size", "96x64", "--size", "96x63"], ["--size 96x63"]),  # the good one is not built either
    ],
)
def test_a_profile_that_cannot_be_built(
    refused: Refused, converted: Path, options: list[str], parts: list[str]
) -> None:
    defaults = ["--size", "96x64", "--frames", "9", "--target", "cpu"]
    given = [*defaults[:2] * ("--size" not in options), *defaults[2:4] * ("--frames" not in options)]
    given += defaults[4:] * ("--target" not in options)
    line = refused(2, "compile", "--artifact", converted, *given, *options)
    assert all(part in line for part in parts), line


def test_compiling_what_is_no_artifact(refused: Refused, source: Path, tmp_path: Path) -> None:
    for folder in (source, tmp_path / "missing"):
        line = refused(3, "compile", "--artifact", folder, "--size", "96x64", "--frames", "9")
        assert f"{folder} is not an artifact" in line and "wanbuild convert" in line


def test_results_that_cannot_be_written(refused: Refused, converted: Path, tmp_path: Path) -> None:
    line = refused(2, "verify", "--artifact", converted, "--json", tmp_path / "missing" / "outcome.json")
    assert f"--json {tmp_path / 'missing' / 'outcome.json'} cannot be written" in line
    line = refused(2, "verify", "--artifact", converted, "--record", "--source", tmp_path / "source")
    assert "exclude each other" in line
