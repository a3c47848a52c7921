"""The files of programs and executables are checked before they are used."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.export
import pytest

from helpers.damage import PROFILE, executable, flip, own, program
from helpers.manifests import programs_of
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import ArtifactError, UsageError
from wanrun.executables.entries import overlay_folder, read_entry, read_program


def test_a_good_artifact_is_taken(toy_artifact: Path) -> None:
    manifest = read_manifest(toy_artifact)
    target = manifest.targets["cpu"]
    for name, entry in target.executables[PROFILE].items():
        read_entry(toy_artifact, target, name, entry)
    programs = programs_of(manifest, PROFILE)
    for name, item in programs.items():
        exported = jax.export.deserialize(bytearray(read_program(toy_artifact, name, item)))
        assert exported.platforms == ("cpu",)


@pytest.mark.parametrize("name", ["prepare", "decode_video"])
def test_a_damaged_program_is_refused(artifact: Path, name: str) -> None:
    own(artifact, "programs")
    file, item = program(artifact, name), programs_of(read_manifest(artifact), PROFILE)[name]
    flip(file, 100)
    with pytest.raises(
        ArtifactError, match=rf"program {name} is damaged: {file}; expected sha256 .*; found .*wanbuild"
    ):
        read_program(artifact, name, item)
    file.unlink()
    with pytest.raises(
        ArtifactError, match=f"program {name} is damaged: {file}; .*found No such file .*; copy the"
    ):
        read_program(artifact, name, item)


def test_a_damaged_executable_is_refused(artifact: Path) -> None:
    target = read_manifest(artifact).targets["cpu"]
    own(artifact, target.folder.partition("/")[0])
    file, entry = executable(artifact, "prepare"), target.executables[PROFILE]["prepare"]
    flip(file, 100)
    with pytest.raises(
        ArtifactError, match=rf"the executable of prepare is damaged: {file}; expected sha256"
    ):
        read_entry(artifact, target, "prepare", entry)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=r"prepare is damaged: .*; expected sha256"):
        read_entry(artifact, target, "prepare", entry)
    file.unlink()
    with pytest.raises(ArtifactError, match=r"is damaged: .*; found No such file"):
        read_entry(artifact, target, "prepare", entry)


def test_the_overlay_is_of_an_artifact_a_target_and_a_kind_of_host(
    toy_artifact: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manifest = read_manifest(toy_artifact)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = overlay_folder(manifest, "cpu")
    assert folder.is_dir() and folder.parent == tmp_path / "cache" / "wanrun" / "executables"
    assert folder.name.startswith(f"{manifest.content_digest.removeprefix('sha256:')[:16]}-cpu-")
    assert overlay_folder(manifest, "cpu") == folder
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"cannot be kept in .*; set XDG_CACHE_HOME to a folder"):
        overlay_folder(manifest, "cpu")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=r"cannot be kept in .*; found Permission denied; set XDG"):
        overlay_folder(manifest, "cpu")
