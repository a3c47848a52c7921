"""A bad place to convert to, or a profile that cannot be built: one clear line, and nothing touched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.refusals import check_parts
from hostile.refusal import edit_json, everything, refusal
from wanbuild.cli import wanbuild
from wancli.console import run
from wanrun.codes import ErrorCode

VAE = "vae/diffusion_pytorch_model.safetensors"

Refused = Callable[..., dict[str, Any]]


@pytest.fixture
def source(toy_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the toy that a test may break."""
    return Path(shutil.copytree(toy_checkpoint, tmp_path / "source"))


@pytest.fixture(scope="module")
def converted(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact without programs, which no test changes."""
    folder = tmp_path_factory.mktemp("converted") / "artifact"
    assert run(wanbuild, ["convert", str(toy_checkpoint), "--artifact", str(folder)]) == 0
    return folder


@pytest.fixture
def refused(tmp_path: Path, converted: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs wanbuild, which has to fail with one error and leave every file and folder as it was."""

    def call(exit_code: int, code: str, *arguments: object, **parts: object) -> dict[str, Any]:
        before = everything(converted.parent)
        error = refusal(capsys, tmp_path, wanbuild, arguments, exit_code)
        assert everything(converted.parent) == before  # no artifact, no .building sibling, no lock
        assert error["code"] == code, error
        check_parts(error, **parts)
        return error

    return call


def test_a_missing_folder(refused: Refused, tmp_path: Path) -> None:
    source, remedy = tmp_path / "nowhere", "checkpoint's folder"
    convert = "convert", source, "--artifact", tmp_path / "artifact"
    refused(4, "missing_file", *convert, message=source, remedy=remedy)


def test_a_full_disk(refused: Refused, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**6))
    convert = "convert", source, "--artifact", tmp_path / "artifact"
    refused(4, "no_space", *convert, message=tmp_path, found="1.00 MB", remedy="free")


def test_an_existing_artifact_is_kept(refused: Refused, toy_checkpoint: Path, converted: Path) -> None:
    convert = "convert", toy_checkpoint, "--artifact", converted
    refused(2, "exists", *convert, message=converted, remedy="--force")


@pytest.mark.slow
def test_an_artifact_is_not_replaced_by_a_bad_source(refused: Refused, source: Path, converted: Path) -> None:
    tensors = load_file(source / VAE)
    save_file({**tensors, "decoder.conv_out.bias": np.array([0.1, np.nan, 0.2], np.float32)}, source / VAE)
    convert = "convert", source, "--artifact", converted, "--force"
    refused(4, "not_finite", *convert, message="decoder.conv_out.bias")


@pytest.mark.slow
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_what_is_no_artifact_is_never_replaced(
    refused: Refused, source: Path, tmp_path: Path, force: tuple[str, ...]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("the only copy")
    for existing in (tmp_path / "folder", tmp_path / "folder" / "thesis.txt", source):
        told = refused(2, "exists", "convert", source, "--artifact", existing, *force, message=existing)
        assert "another folder" in told["remedy"] and "--force" not in told["remedy"]


def test_a_parent_that_does_not_exist(refused: Refused, source: Path, tmp_path: Path) -> None:
    convert = "convert", source, "--artifact", tmp_path / "missing" / "artifact"
    refused(2, "missing_file", *convert, message=tmp_path / "missing", remedy="create")


@pytest.mark.slow
def test_as_a_user_runs_it(cli: Any, source: Path, tmp_path: Path) -> None:
    """The same through the installed command: one line, no traceback, no progress."""
    edit_json(source / "vae" / "config.json", lambda data: data.update(window=7))
    line = cli.fails(4, "wanbuild", "convert", source, "--artifact", tmp_path / "artifact")
    assert "window = 7" in line
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        (["--size", "100x64"], "unsupported", {"expected": "16", "remedy": ("96x64", "112x64")}),
        (["--size", "96x56"], "unsupported", {"expected": "16", "remedy": ("96x48", "96x64")}),
        (["--size", "96"], "wrong_type", {"found": "'96'", "expected": "832x480"}),
        (["--frames", "10"], "unsupported", {"expected": "4n + 1", "remedy": ("9", "13")}),
        (["--frames", "0"], "unsupported", {"expected": "at least 1", "remedy": "1"}),
        (["--num-videos", "0"], "invalid_value", {"message": "x>=1"}),
        (["--target", "v9x:2x4"], "unknown_name", {"expected": "cpu"}),
        (["--dtype", "float8"], "invalid_value", {"message": "bfloat16"}),
        (["--size", "96x64", "--size", "96x63"], "unsupported", {}),  # the good one is not built either
    ],
)
def test_a_profile_that_cannot_be_built(
    refused: Refused, converted: Path, options: list[str], error: str, parts: dict[str, Any]
) -> None:
    defaults = ["--size", "96x64", "--frames", "9", "--target", "cpu"]
    given = [*defaults[:2] * ("--size" not in options), *defaults[2:4] * ("--frames" not in options)]
    given += defaults[4:] * ("--target" not in options)
    told = refused(2, error, "compile", "--artifact", converted, *given, *options, **parts)
    assert options[-2].strip("-") in told["message"] and options[-1] in told["message"]


def test_compiling_what_is_no_artifact(refused: Refused, source: Path, tmp_path: Path) -> None:
    codes: dict[Path, ErrorCode] = {source: "wrong_kind", tmp_path / "missing": "missing_file"}
    for folder, code in codes.items():
        command = "compile", "--artifact", folder, "--size", "96x64", "--frames", "9"
        refused(3, code, *command, message=folder, remedy="wanbuild convert")


def test_results_that_cannot_be_written(refused: Refused, converted: Path, tmp_path: Path) -> None:
    file = tmp_path / "missing" / "outcome.json"
    refused(2, "unwritable", "verify", "--artifact", converted, "--json", file, message=f"--json {file}")
    verify = "verify", "--artifact", converted, "--record", "--source", tmp_path / "source"
    refused(2, "conflict", *verify, message=("--record", "--source"))
