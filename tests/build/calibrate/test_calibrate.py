"""``wanbuild calibrate``: what it reads and writes, what it takes up again, and what it refuses."""

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
from wanbuild.calibrate.calibrate import calibrate, taken_steps
from wanbuild.calibrate.calibrate_options import CalibrateRequest
from wanbuild.calibrate.fit import Steps
from wanbuild.calibrate.memo import Memo
from wanbuild.calibrate.prompt_sets import PROMPTS, read_prompts
from wanbuild.calibrate.runs import Runs
from wanbuild.cli import wanbuild
from wancli.console import run
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.model import Chunking
from wanrun.artifact.schedules import Schedule
from wanrun.codes import ErrorCode
from wanrun.errors import WanError
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


def with_steps(manifest: Manifest) -> Manifest:
    return with_model(manifest, {"timesteps": [1000.0, 500.0]})


def with_chunks(manifest: Manifest) -> Manifest:
    model = structs.replace(manifest.model, chunks=Chunking(first=1, each=3))
    return manifest.changed(model=model)


def of_elsewhere(manifest: Manifest) -> Manifest:
    (target,) = manifest.targets.values()
    elsewhere = structs.replace(target, environment={**target.environment, "machine": "aarch64"})
    return manifest.changed(targets={"cpu": elsewhere})


@pytest.mark.parametrize(
    ("changed", "code", "parts"),
    [
        (with_steps, "unsupported", {"found": "1000, 500"}),
        (with_chunks, "unsupported", {"what": "calibrated"}),
        (of_elsewhere, "not_built", {"found": "aarch64", "remedy": "wanbuild compile"}),
    ],
)
def test_models_and_machines_that_are_not_calibrated(
    request_of: Make, changed: Callable[[Manifest], Manifest], code: ErrorCode, parts: dict[str, str]
) -> None:
    request = request_of()
    changed(read_manifest(request.artifact)).write(request.artifact)
    with refuses(code, WanError, **parts):
        told(request)


# ``wanbuild calibrate --from``: whose schedules are measured, and what is recorded of them.


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


# The prompts that steps are chosen by, and those that judge.


def test_prompts_go_into_three_sets(tmp_path: Path) -> None:
    """In turn; one with another seed goes where that prompt is."""
    texts = [f"fox {i}" for i in (0, 1, 2, 3, 1, 4, 5, 6)]
    lines = [{"prompt": text, "negative_prompt": "n", "seed": seed} for seed, text in enumerate(texts)]
    found = read_prompts(write_lines(tmp_path / "p.jsonl", *lines))
    assert [line.prompt for line in found.chosen_by] == ["fox 0", "fox 3", "fox 6"]
    assert [line.prompt for line in found.decided_by] == ["fox 1", "fox 1", "fox 4"]
    assert [line.prompt for line in found.reported_by] == ["fox 2", "fox 5"]
    assert len({line.seed for line in found.lines()}) == len(lines)
    assert all(line.negative_prompt == "n" for line in found.lines())


def test_few_prompts_that_judge_are_doubted(tmp_path: Path) -> None:
    own = read_prompts(None)
    assert len(own.lines()) == len(PROMPTS) == len(set(PROMPTS)) and not [*own.doubts()]
    lines = [{"prompt": prompt} for prompt in PROMPTS]
    for some in (lines[:-1], [*lines[:-1], lines[-4]]):  # two seeds of a prompt are one
        assert len([*read_prompts(write_lines(tmp_path / "p.jsonl", *some)).doubts()]) == 1


@pytest.mark.parametrize(
    ("code", "key", "line"),
    [
        ("no_effect", "steps", {"prompt": "a", "steps": 3}),
        ("no_effect", "size", {"prompt": "a", "size": "64x64"}),
        ("no_effect", "schedule", {"prompt": "a", "schedule": "x"}),
        ("no_effect", "guidance_end", {"prompt": "a", "guidance_end": 0.5}),
        ("wrong_type", "prompt", {"prompt": 3}),
    ],
)
def test_what_a_calibration_decides(
    code: ErrorCode, key: str, line: dict[str, object], tmp_path: Path
) -> None:
    with refuses(code, what=f"p.jsonl:2: {key} "):
        read_prompts(write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, line, {"prompt": "b"}))


def test_too_few(tmp_path: Path) -> None:
    with refuses("out_of_range", expected=3, found=2):
        read_prompts(write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}))


# What an interrupted calibration keeps.


def never() -> float:
    raise AssertionError("it was measured before")


def test_what_was_measured_is_kept_until_it_is_forgotten() -> None:
    memo = Memo({"content": "a"})
    assert memo.figure({"run": 1}, lambda: 38.5) == 38.5 == memo.figure({"run": 1}, never)
    assert np.array_equal(memo.array("frames", lambda: np.arange(3)), np.arange(3))
    again = Memo({"content": "a"})
    assert again.figure({"run": 1}, never) == 38.5
    assert np.array_equal(again.array("frames", lambda: np.zeros(0)), np.arange(3))
    assert Memo({"content": "b"}).figure({"run": 1}, lambda: 2.0) == 2.0
    again.forget()
    assert Memo({"content": "a"}).figure({"run": 1}, lambda: 1.0) == 1.0


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data + b"\xff\n[]\n{}\n"])
def test_a_damaged_file_costs_its_last_figures(damage: Callable[[bytes], bytes]) -> None:
    memo = Memo({})
    for number in range(2):
        memo.figure({"run": number}, lambda number=number: float(number))  # type: ignore[misc]
    (file,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("figures.jsonl")
    file.write_bytes(damage(file.read_bytes()))
    assert Memo({}).figure({"run": 0}, never) == 0.0
    memo.array("frames", lambda: np.arange(3))
    (frames,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("frames.npy")
    frames.write_bytes(frames.read_bytes()[:-4])
    assert np.array_equal(Memo({}).array("frames", lambda: np.arange(5)), np.arange(5))


def test_without_a_cache_all_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert Memo({}).figure({}, lambda: 3.0) == 3.0
    assert np.array_equal(Memo({}).array("frames", lambda: np.arange(3)), np.arange(3))
    Memo({}).forget()
