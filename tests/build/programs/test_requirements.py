"""The requirements files of an artifact."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from helpers.manifests import plain_target
from wanbuild.build import compile_artifact
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.check.verify import check_files
from wanbuild.programs.requirements import with_requirements, write_requirements
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.targets import Target
from wanrun.errors import ArtifactError
from wanrun.files import sha256_of
from wanrun.machine.environment import host_environment, host_mismatches

REPOSITORY = Path(__file__).parents[3]


def target(zstandard: bool = True, **packages: str) -> Target:
    versions = {"jax": "0.10.2", "jaxlib": "0.10.2", **packages}
    return plain_target(environment={"packages": versions, "zstandard": zstandard})


def written(artifact: Path, targets: dict[str, Target]) -> dict[str, list[str]]:
    """The lines of the files by the target that names them; every digest is that of its file."""
    found: dict[str, list[str]] = {}
    made = with_requirements(targets)
    write_requirements(artifact, made)
    for name, one in made.items():
        path = artifact / one.requirements.file
        assert one.requirements.sha256 == sha256_of(path.read_bytes())
        found[name] = lines(path)
    assert {path.name for path in artifact.iterdir()} == {one.requirements.file for one in made.values()}
    return found


def lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]


def test_one_file_where_targets_need_the_same(tmp_path: Path) -> None:
    found = written(tmp_path, {"cpu": target(), "cpu-of-another-kind": target()})
    assert [path.name for path in tmp_path.iterdir()] == ["requirements.txt"]
    assert found["cpu"] == ["jax==0.10.2", "jaxlib==0.10.2", "zstandard"]


def test_a_file_each_where_they_differ(tmp_path: Path) -> None:
    found = written(tmp_path, {"cpu": target(zstandard=False), "tpu": target(libtpu="0.0.30")})
    assert {path.name for path in tmp_path.iterdir()} == {"requirements-cpu.txt", "requirements-tpu.txt"}
    assert found == {
        "cpu": ["jax==0.10.2", "jaxlib==0.10.2"],
        "tpu": ["jax==0.10.2", "jaxlib==0.10.2", "libtpu==0.0.30", "zstandard"],
    }


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    written(tmp_path, {"cpu": target()})
    before = (tmp_path / "requirements.txt").stat()
    written(tmp_path, {"cpu": target()})
    assert (tmp_path / "requirements.txt").stat().st_ino == before.st_ino


def test_odd_versions_are_what_pip_takes(tmp_path: Path) -> None:
    """A nightly, a build of one's own, a release of a release."""
    versions = {"jax": "0.12.0.dev20261101", "jaxlib": "0.12.0+cuda13.selfbuilt", "libtpu": "0.12.0.1"}
    (texts,) = written(tmp_path, {"tpu": target(**versions)}).values()
    found = {one.name: one.specifier for one in map(Requirement, texts)}
    assert all(found[name].contains(version, prereleases=True) for name, version in versions.items())


def test_an_artifact_s_are_what_is_installed_here(toy_artifact: Path) -> None:
    """So that pip finds nothing to do on the machine that built it, and wanrun no mismatch."""
    (built,) = read_manifest(toy_artifact).targets.values()
    path = toy_artifact / built.requirements.file
    found = [Requirement(line) for line in lines(path)]
    assert {one.name for one in found} >= {"jax", "jaxlib"}
    assert all(one.specifier.contains(importlib.metadata.version(one.name)) for one in found)
    assert built.environment["packages"] == host_environment("cpu")["packages"]
    assert host_mismatches(built.environment, path) == []


def test_the_runtime_installs_with_it(toy_artifact: Path) -> None:
    """``pip install . -r requirements.txt`` resolves: the runtime's own range has these versions."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    ranges = {one.name: one.specifier for one in map(Requirement, project["dependencies"])}
    (built,) = read_manifest(toy_artifact).targets.values()
    packages = built.environment["packages"]
    assert all(ranges[name].contains(packages[name]) for name in packages.keys() & ranges.keys())
    assert {"jax", "zstandard"} <= ranges.keys()


@pytest.mark.thorough
def test_verify_notices_damage_and_compile_repairs_it(artifact_copy: Path) -> None:
    path, stray = artifact_copy / "requirements.txt", artifact_copy / "requirements-tpu.txt"
    whole = path.read_bytes()
    path.write_bytes(whole + b"evil\n")
    stray.write_bytes(b"of a target that is gone")
    with pytest.raises(ArtifactError, match=r"requirements\.txt is damaged"):
        check_files(open_artifact(artifact_copy), lambda line: None)
    options = BuildOptions(dtype="float32")
    compile_artifact(CompileRequest(artifact_copy, ["cpu"], [(96, 64)], [9], [True], options=options), print)
    assert path.read_bytes() == whole and not stray.exists()
    check_files(open_artifact(artifact_copy), lambda line: None)
