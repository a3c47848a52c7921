"""What an artifact lacks, and a compilation that goes wrong: exit code 3, and the artifact as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from helpers.compiling import exported_once
from helpers.damage import (
    PROFILE,
    PROGRAMS,
    Declines,
    edit_environment,
    flip,
    one_error,
    own,
    program,
)
from helpers.manifests import without_profiles
from wanbuild.cli import wanbuild
from wanbuild.programs import xla
from wancli.console import run
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import read_manifest


def test_not_an_artifact(declines: Declines, tmp_path: Path, toy_checkpoint: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder, code, found, remedy in (
        (tmp_path / "missing", "missing_file", "no such folder", "wanbuild convert"),
        (tmp_path / "file", "wrong_kind", "a file", "wanbuild convert"),
        (toy_checkpoint, "wrong_kind", "a checkpoint", f"wanbuild convert {toy_checkpoint} --artifact"),
    ):
        for options in ((), ("--list",)):
            declines(folder, code, *options, message=folder, found=found, remedy=remedy)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--size", "832x480"], "832x480"),
        (["--frames", "13"], "13 frames"),
        (["--num-videos", "2"], "2 video(s)"),
    ],
)
@pytest.mark.usefixtures("no_weights_are_read")
def test_a_profile_that_is_not_built(
    declines: Declines, toy_artifact: Path, options: list[str], wanted: str
) -> None:
    declines(toy_artifact, "not_built", *options, message=wanted, expected=PROFILE, remedy="wanbuild compile")


@pytest.mark.usefixtures("no_weights_are_read")
def test_no_frames_at_all(declines: Declines, toy_artifact: Path) -> None:
    """Out of range for every artifact, and so the command line's fault."""
    told = declines(toy_artifact, "out_of_range", "--frames", "0", code=2, expected=1, found=0)
    assert told["options"] == ["--frames"]


def test_no_profile_at_all(declines: Declines, toy_artifact: Path, tmp_path: Path) -> None:
    manifest, folder = read_manifest(toy_artifact), tmp_path / "empty"
    folder.mkdir()
    without_profiles(manifest).write(folder)
    declines(folder, "not_built", message=folder, remedy="wanbuild compile")
    manifest.changed(targets={}).write(folder)
    declines(folder, "not_built", message=PROFILE)


@pytest.mark.usefixtures("no_weights_are_read")
def test_a_target_that_is_not_built(declines: Declines, toy_artifact: Path) -> None:
    command, target = "wanbuild compile --size", ("--target", "tpu7x:2x2x1")
    declines(toy_artifact, "not_built", *target, message=target[1], expected="cpu", remedy=command)
    told = declines(toy_artifact, "not_built", "--target", "tpu", expected="cpu", remedy="docs/targets.md")
    command += f" 96x64 --frames 9 --guidance --target v6e --artifact {toy_artifact}"
    assert command in told["remedy"]


# Programs, executables and the tokenizer.


@pytest.mark.parametrize("allow", [(), ("--allow-compile",)])
def test_a_damaged_program(declines: Declines, artifact: Path, allow: tuple[str, ...]) -> None:
    """Also with --allow-compile: there is nothing sound to compile from."""
    own(artifact, "programs")
    path = program(artifact, "decode_video")
    flip(path, 1000)
    declines(artifact, "damaged", *allow, message=path, remedy="copy")
    path.unlink()
    declines(artifact, "damaged", *allow, message=path, found="No such file")


@pytest.mark.thorough
def test_compile_does_not_use_a_damaged_program(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A target that has to be compiled again refuses StableHLO which is not what was exported."""
    own(artifact, "programs")
    own(artifact, "executables")
    edit_environment(artifact, device_count=9)
    flip(program(artifact, "decode_first"), 1000)
    before = (artifact / "manifest.json").read_bytes()
    arguments = ["--artifact", artifact, "--target", "cpu", "--size", "32x32", "--frames", "1"]
    assert run(wanbuild, ["compile", *map(str, arguments)]) == 3
    assert "/decode_first-" in one_error(capsys)
    assert (artifact / "manifest.json").read_bytes() == before
    check_executables(artifact)


def check_executables(artifact: Path) -> None:
    """Checks that every executable that the manifest lists is there and whole."""
    opened = open_artifact(artifact)
    target = opened.manifest.targets["cpu"]
    for entry in target.executables[PROFILE].values():
        opened.executable(target, entry)


@pytest.fixture
def programs_are_exported_once() -> Iterator[None]:
    with exported_once():
        yield


@pytest.mark.thorough
@pytest.mark.usefixtures("programs_are_exported_once")
def test_a_compilation_cut_short_keeps_the_old_executables(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a changed environment that gives the same cache keys, so that entries have the same names."""
    lowered: list[str] = []

    def lower(data: bytes, name: str, *rest: object, **options: object) -> Any:
        """A small program of its name: what is compiled does not matter here."""
        lowered.append(name)
        if len(lowered) == interrupt_at:
            raise KeyboardInterrupt

        def call(x: jax.Array) -> jax.Array:
            return x + len(name)

        call.__name__ = call.__qualname__ = name
        return jax.jit(call).lower(jax.ShapeDtypeStruct((3,), np.float32))

    def compile_again() -> int:
        arguments = ["--artifact", artifact, "--target", "cpu", "--size", "96x64", "--frames", "9"]
        return run(wanbuild, ["compile", *map(str, arguments), "--dtype", "float32"])

    own(artifact, "programs")
    own(artifact, "executables")
    monkeypatch.setattr(xla, "lower", lower)
    interrupt_at = 0
    edit_environment(artifact, device_count=9)
    assert compile_again() == 0
    assert sorted(lowered) == list(PROGRAMS)
    edit_environment(artifact, device_count=7)
    folder = artifact / read_manifest(artifact).targets["cpu"].folder
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    interrupt_at, lowered[:] = 3, []
    assert compile_again() == 130
    assert len(lowered) == 3
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()} == before
    check_executables(artifact)

    interrupt_at, lowered[:] = 0, []
    assert compile_again() == 0
    check_executables(artifact)
    target = read_manifest(artifact).targets["cpu"]
    assert [path.name for path in (artifact / "executables").iterdir()] == [Path(target.folder).name]
    assert {path.name for path in (artifact / target.folder).iterdir()} == set(before)


# Weights.
