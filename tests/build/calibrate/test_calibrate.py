"""``wanbuild calibrate``: what it writes, what it takes up again, and what it refuses."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from PIL import Image

from helpers.fake_pipeline import write_lines
from helpers.manifests import with_model
from helpers.refusals import refuses
from wanbuild.calibrate import search
from wanbuild.calibrate.calibrate import calibrate
from wanbuild.calibrate.calibrate_options import CalibrateRequest
from wanbuild.calibrate.runs import Runs
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.model import Chunking
from wanrun.errors import ArtifactError, UsageError
from wanrun.generation.load import load
from wanrun.intact import check_intact

REFERENCE = 12
"""Steps of the runs that count as converged here, which keeps them short."""

Make = Callable[..., CalibrateRequest]


class StoppedError(Exception):
    """Ends a calibration in the middle."""


@pytest.fixture
def request_of(artifact_copy: Path, tmp_path: Path) -> Make:
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "a fox"}, {"prompt": "snow"}, {"prompt": "a dog"})

    def make(artifact: Path = artifact_copy, **given: Any) -> CalibrateRequest:
        given = {"reference_steps": REFERENCE, "evaluations": [8], **given}
        return CalibrateRequest(artifact, file, **given)

    return make


def told(request: CalibrateRequest) -> list[str]:
    lines, warnings = list[str](), list[str]()
    calibrate(request, lines.append, warnings.append)
    assert len(warnings) == 1  # of three prompts one judges
    return lines


@pytest.mark.thorough
def test_schedules_are_chosen_once_and_run_with_what_is_built(
    request_of: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "POWERS", search.POWERS[:2])
    request = request_of()
    shutil.copytree(request.artifact, other := tmp_path / "other")
    lines = told(request)
    assert re.findall(r"\d+", lines[0]) == ["1", "2", str(REFERENCE)]
    assert re.fullmatch(r"about \d:\d\d for 4 steps", lines[1])
    assert [line.split(":")[0] for line in lines[2:-1]] == ["4 steps"]
    assert str(request.artifact / "schedules.png") in lines[-1]
    assert Image.open(BytesIO((request.artifact / "schedules.png").read_bytes())).size[0] > 500
    manifest = read_manifest(request.artifact)
    check_intact(Artifact(manifest, request.artifact), lines.append)
    four = manifest.schedules["4-steps"]
    assert (len(four.timesteps), four.evaluations) == (4, 8)
    assert (four.solver, four.guidance_scale) == ("unipc", manifest.model.defaults.guidance_scale)
    figures: Any = four.measured
    assert figures["psnr"] == figures["plain_psnr"] and figures["gain"] == 0  # of one prompt nothing is sure
    assert "decided" in figures and not any(name.endswith("_low") for name in figures)
    assert (figures["decided_by"], figures["reported_by"]) == (1, 1)
    assert figures["converged_steps"] == REFERENCE
    with load(request.artifact) as pipeline:
        result = pipeline.generate("a fox", schedule="4-steps")
        assert pipeline.timings.cache_misses == result.timings.cache_misses == 0
        assert tuple(result.options["timesteps"]) == four.timesteps
        in_one_call = pipeline.generate("a fox", schedule="4-steps", loop="scan")
        assert np.abs(in_one_call.latents - result.latents).max() < 1e-4

    # The same of a copy, ended in the middle: what it has measured is taken up, and the result is the same.
    made, compared = list[str](), Runs._compared

    def counted(runs: Runs, *given: Any) -> float:
        made.append("run")
        if len(made) == 7:
            raise StoppedError
        return compared(runs, *given)

    monkeypatch.setattr(Runs, "_compared", counted)
    with pytest.raises(StoppedError):
        told(request_of(other))
    assert read_manifest(other).schedules == {}
    told(request_of(other))
    assert (other / "manifest.json").read_bytes() == (request.artifact / "manifest.json").read_bytes()
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("figures.jsonl"))  # nothing is kept of it


@pytest.mark.slow
def test_a_budget(request_of: Make) -> None:
    request = request_of(minutes=0, evaluations=[8, 6])
    left_out = [line for line in told(request) if "left out" in line]
    assert [re.findall(r"\d+", line) for line in left_out] == [["4", "0"], ["3", "0"]]  # steps, minutes
    assert read_manifest(request.artifact).schedules == {}


@pytest.mark.slow
@pytest.mark.parametrize("evaluations", [[2], [8, 2000]])
def test_evaluations_out_of_range(request_of: Make, evaluations: list[int]) -> None:
    with refuses("out_of_range", what="--evaluations", expected="4 to ", found=evaluations[-1]):
        told(request_of(evaluations=evaluations))


@pytest.mark.slow
def test_an_artifact_that_was_built_anew_meanwhile(request_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(minutes=0)
    resolved = Runs.resolved

    def anew(runs: Runs, *given: Any, **options: Any) -> Any:
        manifest = read_manifest(request.artifact)
        with_model(manifest, {"fps": 8}).write(request.artifact)
        return resolved(runs, *given, **options)

    monkeypatch.setattr(Runs, "resolved", anew)
    with refuses("changed", what=request.artifact, expected="sha256:", found="sha256:"):
        told(request)


def test_a_model_with_steps_of_its_own(request_of: Make) -> None:
    request = request_of()
    manifest = read_manifest(request.artifact)
    with_model(manifest, {"timesteps": [1000.0, 500.0]}).write(request.artifact)
    with refuses("unsupported", found="1000, 500"):
        told(request)


def test_a_model_of_chunks(request_of: Make) -> None:
    request = request_of()
    manifest = read_manifest(request.artifact)
    model = structs.replace(manifest.model, chunks=Chunking(first=1, each=3))
    manifest.changed(model=model).write(request.artifact)
    with pytest.raises(UsageError, match="calibrated"):
        told(request)


def test_what_cannot_run_here(request_of: Make) -> None:
    request = request_of()
    manifest = read_manifest(request.artifact)
    (target,) = manifest.targets.values()
    elsewhere = structs.replace(target, environment={**target.environment, "machine": "aarch64"})
    manifest.changed(targets={"cpu": elsewhere}).write(request.artifact)
    with refuses("not_built", ArtifactError, found="aarch64", remedy="wanbuild compile"):
        told(request)
