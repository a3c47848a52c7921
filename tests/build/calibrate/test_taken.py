"""``wanbuild calibrate --from``: whose schedules are taken, and what is said of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec import structs

from helpers.manifests import with_model
from wanbuild.calibrate.taken import take
from wanbuild.cli import wanbuild
from wancli.console import run
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.schedules import Schedule
from wanrun.errors import UsageError
from wanrun.intact import check_intact

FEW = Schedule(
    solver="unipc",
    timesteps=(1000.0, 700.0, 300.0),
    guidance_scale=5.0,
    coefficients=((0.7, 0.3, 0.0, 0.0), (0.5, 0.6, -0.1, 0.0), (0.1, 1.0, -0.1, 0.0)),
    measured={"psnr": 40.0, "plain_psnr": 35.0},
)


@pytest.fixture
def source(artifact_copy: Path, tmp_path: Path) -> Path:
    """A copy of the artifact, with a schedule."""
    shutil.copytree(artifact_copy, other := tmp_path / "other")
    read_manifest(other).changed(schedules={"3-steps": FEW}).write(other)
    return other


def test_they_are_taken_without_their_figures(
    artifact_copy: Path, source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(wanbuild, ["calibrate", str(artifact_copy), "--from", str(source)]) == 0
    assert "has the schedules 3-steps; those of" in capfd.readouterr().out
    manifest = read_manifest(artifact_copy)
    assert manifest.schedules == {"3-steps": structs.replace(FEW, measured={})}
    assert "not calibrated here" in manifest.schedules["3-steps"].describe()
    check_intact(Artifact(manifest, artifact_copy), print)


def test_those_of_another_model_are_refused(
    artifact_copy: Path, source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (artifact_copy / "manifest.json").read_bytes()
    with pytest.raises(UsageError, match=r"other has no schedules; calibrate it first"):
        read_manifest(source).changed(schedules={}).write(source)
        take(artifact_copy, source)
    with_model(read_manifest(source).changed(schedules={"3-steps": FEW}), {"flow_shift": 12.0}).write(source)
    said = r"are for another model; expected flow_shift [\d.]+; found flow_shift 12.0"
    with pytest.raises(UsageError, match=said):
        take(artifact_copy, source)
    assert run(wanbuild, ["calibrate", str(artifact_copy), "--from", str(source), "--minutes", "3"]) == 2
    assert "--from measures nothing; leave the other options out" in capfd.readouterr().err
    assert (artifact_copy / "manifest.json").read_bytes() == before
