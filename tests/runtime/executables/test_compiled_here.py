"""The files of programs and executables are checked before they are used."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.export
import pytest

from helpers.damage import PROFILE, executable, flip, own, program
from helpers.manifests import programs_of
from helpers.refusals import refuses
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import ArtifactError
from wanrun.executables.compiled_here import overlay_folder
from wanrun.files import file_sha256


def test_a_good_artifact_is_taken(toy_artifact: Path) -> None:
    artifact = open_artifact(toy_artifact)
    target = artifact.manifest.targets["cpu"]
    for entry in target.executables[PROFILE].values():
        artifact.executable(target, entry)
    for item in programs_of(artifact.manifest, PROFILE).values():
        exported = jax.export.deserialize(bytearray(artifact.program(item)))
        assert exported.platforms == ("cpu",)


@pytest.mark.parametrize("name", ["prepare", "decode_video"])
def test_a_damaged_program_is_refused(artifact: Path, name: str) -> None:
    own(artifact, "programs")
    opened = open_artifact(artifact)
    file, item = program(artifact, name), programs_of(opened.manifest, PROFILE)[name]
    flip(file, 100)
    for found in (file_sha256(file), "No such file"):
        with refuses("damaged", ArtifactError, what=file, expected="sha256", found=found, remedy="wanbuild"):
            opened.program(item)
        file.unlink(missing_ok=True)


def test_a_damaged_executable_is_refused(artifact: Path) -> None:
    opened = open_artifact(artifact)
    target = opened.manifest.targets["cpu"]
    own(artifact, target.folder.partition("/")[0])
    file, entry = executable(artifact, "prepare"), target.executables[PROFILE]["prepare"]
    flip(file, 100)
    with refuses("damaged", ArtifactError, what=file, expected="sha256", found=file_sha256(file)):
        opened.executable(target, entry)
    file.write_bytes(file.read_bytes()[:-1])
    with refuses("damaged", ArtifactError, what=file, expected="sha256"):
        opened.executable(target, entry)
    file.unlink()
    with refuses("damaged", ArtifactError, what=file, found="No such file"):
        opened.executable(target, entry)


def test_the_overlay_is_of_an_artifact_a_target_and_a_kind_of_host(
    toy_artifact: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manifest = read_manifest(toy_artifact)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = overlay_folder(manifest, "cpu")
    assert folder.make().is_dir() and folder.path.parent == tmp_path / "cache" / "wanrun" / "executables"
    assert folder.name.startswith(f"{manifest.content_digest.removeprefix('sha256:')[:16]}-cpu-")
    assert overlay_folder(manifest, "cpu") == folder
