"""The executables of every CPU level that can be built here, against diffusers in float32."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.artifacts import with_cpu_levels
from wanbuild.check.reference import compare_with_reference
from wanbuild.targets.cpu_levels import CPU_LEVELS
from wanrun.artifact.manifest import read_manifest
from wanrun.machine.cpu import cpu_level_rank

pytestmark = pytest.mark.thorough

LIMIT = 1e-5


@pytest.fixture(scope="module")
def levels(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_cpu_levels(toy_checkpoint, tmp_path_factory)


@pytest.mark.parametrize("name", CPU_LEVELS)
def test_a_level_against_the_reference(levels: Path, toy_checkpoint: Path, tmp_path: Path, name: str) -> None:
    manifest = read_manifest(levels)
    if name not in manifest.targets:
        pytest.skip(f"this CPU has no {name}")
    artifact = tmp_path / "toy"
    shutil.copytree(levels, artifact)
    manifest.changed(targets={name: manifest.targets[name]}).write(artifact)
    lines: list[str] = []
    checks = compare_with_reference(artifact, str(toy_checkpoint), 3, lines.append)
    assert all(check["error"] <= LIMIT for check in checks.values()), lines


def test_sizes_and_ranks(levels: Path) -> None:
    """Levels share their programs where their products are alike; each has entries of its own."""
    manifest = read_manifest(levels)
    targets = [manifest.targets[name] for name in CPU_LEVELS if name in manifest.targets]
    assert sorted(targets, key=lambda target: cpu_level_rank(target.environment)) == targets
    for target in targets:
        files = list((levels / target.folder).glob("*-cache"))
        entries = [entry for kind in target.executables.values() for entry in kind.values()]
        assert {file.name for file in files} == {entry.file for entry in entries}
        assert sum(entry.nbytes for entry in entries) > 100_000
