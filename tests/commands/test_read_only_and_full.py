"""Folders that cannot be written and disks that are full: one line, the right code, nothing half done."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import UNPRIVILEGED
from helpers.damage import one_error
from helpers.refusals import check_json
from helpers.small_disk import fill, small_disk
from helpers.terminal import complaints
from wanbuild.cli import wanbuild
from wancli.console import run

Finished = subprocess.CompletedProcess[str]


def unprivileged(*arguments: object) -> Finished:
    """Runs a command to which file permissions apply."""
    program, *rest = map(str, arguments)
    command = [sys.executable, UNPRIVILEGED, sys.executable, "-m", program, *rest]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def read_only(artifact_copy: Path) -> Path:
    for path in (artifact_copy, *artifact_copy.rglob("*")):
        if path.is_dir():
            path.chmod(0o555)
    return artifact_copy


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        ("compile", "--target", "cpu", "--size", "32x32", "--frames", "1"),
        ("compile", "--again"),
        ("verify", "--record"),
        ("embed", "--prompt", "a fox"),
    ],
)
def test_a_read_only_artifact(read_only: Path, command: tuple[str, ...]) -> None:
    before = contents(read_only)
    done = unprivileged("wanbuild", *command, "--artifact", read_only, "--json-errors")
    (line,) = complaints(done.stderr)
    assert done.returncode == 2, line
    check_json(line, "unwritable", message=(read_only, "Permission denied"), remedy="writable")
    assert contents(read_only) == before
    assert [path.name for path in read_only.parent.iterdir()] == [read_only.name]


@pytest.mark.slow
def test_a_toy_in_a_read_only_folder(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    toy = tmp_path / "closed" / "toy"
    done = unprivileged("wanbuild", "toy", toy, "--json-errors")
    assert (done.returncode, done.stdout) == (2, "")
    check_json(done.stderr, "unwritable", message=toy, found="Permission denied", remedy="another folder")


@pytest.mark.parametrize("nbytes", [64 * 2**10, 2**20])
def test_a_toy_on_a_full_disk(tmp_path: Path, nbytes: int, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path, nbytes):
        assert run(wanbuild, ["toy", str(tmp_path / "toy"), "--json-errors"]) == 4
        check_json(one_error(capsys), "no_space", message=tmp_path / "toy", remedy="free some")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "spare"),
    [
        (("compile", "--target", "cpu", "--size", "32x32", "--frames", "1"), 8192),
        (("verify", "--record"), 0),
        (("embed", "--prompt", "a fox"), 0),
        (("embed", "--prompt", "a fox"), 8192),
    ],
)
def test_an_artifact_on_a_full_disk(
    toy_artifact: Path,
    tmp_path: Path,
    command: tuple[str, ...],
    spare: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with small_disk(tmp_path, 64 * 2**20):
        artifact = shutil.copytree(toy_artifact, tmp_path / "artifact")
        before = contents(artifact)
        filler = fill(tmp_path, spare)
        capsys.readouterr()
        assert run(wanbuild, [*command, "--artifact", str(artifact), "--json-errors"]) == 4
        check_json(one_error(capsys), "no_space", message=f" {artifact}")
        filler.unlink()
        assert before.items() <= contents(artifact).items()
        assert {path.name for path in tmp_path.iterdir()} == {"artifact"}


@pytest.mark.thorough
def test_a_video_is_there_though_nothing_can_be_printed(toy_artifact: Path, tmp_path: Path) -> None:
    arguments = ["--artifact", toy_artifact, "--prompt", "a fox", "--steps", "1", "--timing"]
    command = [sys.executable, "-m", "wanrun", *arguments]
    for stream in ("stdout", "stderr"):
        output = tmp_path / f"{stream}.npy"
        with Path("/dev/full").open("w") as full:
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
            done = subprocess.run([*command, "--output", output], **streams, text=True, check=False)
        assert done.returncode == 0
        if stream == "stdout":
            (line,) = complaints(done.stderr)
            assert line.startswith("warning: ") and "No space left" in line
    assert (tmp_path / "stdout.npy").read_bytes() == (tmp_path / "stderr.npy").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("command", [("wanrun", "--list"), ("wanbuild", "inspect")])
def test_a_result_that_cannot_be_printed(toy_artifact: Path, command: tuple[str, ...]) -> None:
    program, *rest = command
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", program, *rest, "--artifact", toy_artifact, "--json-errors"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 4
    check_json(done.stderr, "no_space", message="standard output", remedy="free some")
