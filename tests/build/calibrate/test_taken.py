"""``wanbuild calibrate --from``: whose schedules are measured, and what is recorded of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from helpers.fake_pipeline import write_lines
from helpers.manifests import with_model
from helpers.refusals import refuses
from wanbuild.calibrate.calibrate import taken_steps
from wanbuild.calibrate.fit import Steps
from wanbuild.cli import wanbuild
from wancli.console import run
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.schedules import Schedule
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


@pytest.mark.thorough
def test_they_are_measured_on_the_new_model(
    artifact_copy: Path, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """If they are not surely nearer, the solver's own steps are recorded: of one prompt nothing is sure."""
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "a fox"}, {"prompt": "snow"}, {"prompt": "a dog"})
    command = ["calibrate", str(artifact_copy), "--from", str(source), "--prompts", str(file)]
    assert run(wanbuild, [*command, "--reference-steps", "12"]) == 0
    said = capfd.readouterr()
    assert re.findall(r"\d+", said.out)[:2] == ["2", "12"] and said.err.count("warning: ") == 1
    manifest = read_manifest(artifact_copy)
    found = manifest.schedules["3-steps"]
    assert found.coefficients is None and len(found.timesteps) == 3
    assert found.measured["reported_by"] == 1 and "decided" in found.measured
    check_intact(Artifact(manifest, artifact_copy), print)
    manifest.changed(schedules={"3-steps": FEW}).write(artifact_copy)
    assert run(wanbuild, [*command, "--reference-steps", "12"]) == 0
    assert read_manifest(artifact_copy).schedules["3-steps"] == FEW  # no worse ones take their place


def test_their_steps_are_judged_as_they_are(artifact_copy: Path, source: Path) -> None:
    manifest = read_manifest(artifact_copy)
    assert taken_steps(manifest, source) == {"3-steps": Steps(FEW.timesteps, FEW.coefficients)}


def test_those_of_another_model_are_refused(
    artifact_copy: Path, source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (artifact_copy / "manifest.json").read_bytes()
    manifest = read_manifest(artifact_copy)
    read_manifest(source).changed(schedules={}).write(source)
    with refuses("not_built", what=source, remedy="calibrate"):
        taken_steps(manifest, source)
    with_model(read_manifest(source).changed(schedules={"3-steps": FEW}), {"flow_shift": 12.0}).write(source)
    with refuses("mismatch", expected="flow_shift ", found="flow_shift 12.0"):
        taken_steps(manifest, source)
    for options in ([], ["--evaluations", "6"]):  # before anything is run
        assert run(wanbuild, ["calibrate", str(artifact_copy), "--from", str(source), *options]) == 2
    assert "--evaluations" in capfd.readouterr().err
    assert (artifact_copy / "manifest.json").read_bytes() == before
