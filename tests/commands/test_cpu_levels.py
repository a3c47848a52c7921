"""An artifact with a target for a CPU level beside one CPU's own."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from helpers.artifacts import same_profile, with_cpu_levels
from helpers.damage import edit_environment
from helpers.refusals import refuses
from wanbuild.build import compile_artifact
from wanbuild.build_options import CompileRequest
from wanbuild.programs import entry_compiler
from wanbuild.targets.cpu_levels import CPU_LEVELS
from wanrun import load
from wanrun.artifact.manifest import read_manifest
from wanrun.machine import environment
from wanrun.machine.cpu import CPU_LEVEL_FEATURES
from wanrun.replay.golden import replayed

pytestmark = pytest.mark.slow

LEVEL = "cpu-v3"


def request(artifact: Path) -> CompileRequest:
    """The artifact's profile, for the level."""
    return same_profile(artifact, (LEVEL,))


@pytest.fixture(scope="module")
def both(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the toy, float32, with this CPU's target and the lowest level's."""
    artifact = tmp_path_factory.mktemp("levels") / "toy"
    shutil.copytree(with_cpu_levels(toy_checkpoint, tmp_path_factory), artifact)
    manifest = read_manifest(artifact)
    manifest.changed(targets={name: manifest.targets[name] for name in ("cpu", LEVEL)}).write(artifact)
    return artifact


def latents(artifact: Path, **choices: Any) -> tuple[np.ndarray, list[str]]:
    said: list[str] = []
    with load(artifact, report=said.append, **choices) as pipeline:
        return np.asarray(pipeline.generate("a cat", num_steps=2, seed=3).latents, np.float32), said


def test_both_give_the_same(both: Path) -> None:
    own, said = latents(both)
    assert said == []
    level, said = latents(both, target=LEVEL)
    assert said == [f"target {LEVEL}"]
    assert np.abs(level - own).max() <= 1e-5 * np.abs(own).max()


def test_a_record_of_a_level_names_the_whole_cpu(both: Path) -> None:
    """Digests are compared between equal machines, and products of matrices depend on more than the level."""
    with load(both, target=LEVEL, embeddings="none") as pipeline:
        assert pipeline.environment["cpu_features"] == list(CPU_LEVEL_FEATURES[LEVEL])
        machine = replayed(pipeline, pipeline.environment).golden.machine
    assert machine["cpu_features"] == list(environment.cpu_features()) and machine["cpu_level"] == LEVEL


def under_other_keys(artifact: Path) -> None:
    """Gives the entries of this CPU's target other names, as if JAX had had other keys for them."""
    manifest = read_manifest(artifact)
    target = manifest.targets["cpu"]
    for path in (artifact / target.folder).iterdir():
        path.rename(path.with_name(f"other-{path.name}"))
    renamed = {
        profile: {
            name: msgspec.structs.replace(entry, file=f"other-{entry.file}")
            for name, entry in entries.items()
        }
        for profile, entries in target.executables.items()
    }
    manifest.changed(targets={"cpu": msgspec.structs.replace(target, executables=renamed)}).write(artifact)


def test_a_cpu_with_more_features_than_the_one_that_built(artifact_copy: Path, toy_artifact: Path) -> None:
    """JAX has another key there, which nobody asks for."""
    under_other_keys(artifact_copy)
    edit_environment(artifact_copy, cpu_features=list(environment.cpu_features()[1:]))
    assert np.array_equal(latents(artifact_copy)[0], latents(toy_artifact)[0])


def test_a_cpu_of_that_level_alone_takes_it(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if set(environment.cpu_features()) <= set(CPU_LEVEL_FEATURES[LEVEL]):
        pytest.skip("this CPU has nothing beyond the level")
    monkeypatch.setattr(environment, "cpu_features", lambda: CPU_LEVEL_FEATURES[LEVEL])
    _, (line,) = latents(both)
    assert line.startswith(f"target {LEVEL}; ") and " cpu (" in line


@pytest.mark.thorough
def test_code_beyond_a_level_is_compiled_again(
    both: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Here with a check that finds something in everything, and so in what the last limit gives too."""
    artifact = tmp_path / "toy"
    shutil.copytree(both, artifact)
    shutil.rmtree(artifact / read_manifest(artifact).targets[LEVEL].folder)
    levels = {LEVEL: replace(CPU_LEVELS[LEVEL], limits=("AVX", "SSE4_2"))}
    monkeypatch.setattr("wanbuild.targets.target.CPU_LEVELS", levels)
    monkeypatch.setattr(entry_compiler, "beyond", lambda entry, allowed: ["GFNI"])
    lines: list[str] = []
    with refuses("unsupported", what=LEVEL, expected="SSE4_2", found="GFNI"):
        compile_artifact(request(artifact), lines.append)
    (line,) = (line for line in lines if "GFNI" in line)
    assert all(name in line for name in ("AVX", LEVEL, "SSE4_2"))
