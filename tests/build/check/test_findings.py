"""What a verification finds, and its report: the same verdicts as those of ``compare``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.elsewhere import put_golden
from helpers.fake_pipeline import Run
from helpers.pages import Seen
from helpers.refusals import json_error
from wanbuild.check import verify
from wanbuild.check.findings import Findings, measured, verification
from wanbuild.cli import wanbuild
from wancli.console import run
from wanreport.page import html
from wanrun.artifact.manifest import MANIFEST, read_manifest
from wanrun.errors import VerificationError
from wanrun.replay.golden import Golden, compare
from wanrun.timing.timings import Timings

HERE = Golden("1" * 64, "2" * 64, (0.5, -1.0), {"machine": "here"}, 1e-4, (1, 127, 254))
ELSEWHERE = dataclasses.replace(HERE, machine={"machine": "elsewhere"})
FRAMES = np.zeros((3, 32, 48, 3), np.uint8)


@pytest.mark.parametrize("before", [HERE, ELSEWHERE])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"latents_sha256": "3" * 64},
        {"frames_sha256": "3" * 64},
        {"samples": (0.50001, -1.0)},
        {"samples": (0.6, -1.0)},
        {"samples": (0.5,)},
        {"frame_samples": (1, 127, 251)},
    ],
)
def test_verdicts_are_those_of_compare(before: Golden, changes: dict[str, Any]) -> None:
    after, findings = dataclasses.replace(HERE, **changes), Findings()
    findings.replayed("p", "golden/p.json", before, after)
    try:
        compare(before, after)
        agrees = True
    except VerificationError:
        agrees = False
    assert all(one.passed for one in findings.comparisons) == agrees
    kind = "this kind" if before is HERE else "another kind"
    assert {one.against for one in findings.comparisons} == {f"golden/p.json, recorded on {kind} of machine"}


def test_figures_have_their_tolerance() -> None:
    found = [measured("latents", 2e-5, 1e-4, "diffusers"), measured("video", 0.2, 1e-1, "diffusers")]
    page = Seen(html(verification(Path("a"), Findings(comparisons=found), Timings(), "it agrees")))
    assert page.rows[1:3] == [
        ["latents", "2.0e-05", "1e-04", "20 %", "passed", "diffusers"],
        ["video", "2.0e-01", "1e-01", "200 %", "failed", "diffusers"],
    ]
    assert "1 of 2" in page.text and "it agrees" in page.text


def test_videos_of_a_replay_are_kept() -> None:
    findings, result = Findings(), SimpleNamespace(frames=FRAMES[None])
    pipeline: Any = SimpleNamespace(run=lambda generation, inputs: result, profile="p")
    watched = findings.watched(pipeline, "title")
    assert watched.run(None, inputs=None) is result and watched.profile == "p"  # type: ignore[arg-type,comparison-overlap]
    ((title, frames),) = findings.videos
    assert title == "title" and frames.shape == FRAMES.shape


def run_verify(
    artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: Golden,
    *more: object,
) -> Run:
    """Runs ``wanbuild verify`` with a replay that gives this, and without the checks of files."""

    def replayed(artifact: object, profile: Any, findings: Findings | None, steps: int) -> Golden:
        assert findings is not None and steps == HERE.steps
        findings.videos.append((profile.name, FRAMES))
        return found

    monkeypatch.setattr(verify, "check_all", lambda artifact, say: say("the weights are intact"))
    monkeypatch.setattr(verify, "_run", replayed)
    capsys.readouterr()
    code = run(wanbuild, ["verify", str(artifact), *map(str, more)])
    return Run(code, *capsys.readouterr())


@pytest.mark.parametrize("digest", ["1" * 64, "9" * 64])
def test_the_command_writes_what_it_found(
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    digest: str,
) -> None:
    """Also where the artifact does not agree, with the figures that failed."""
    put_golden(artifact, HERE.as_json())
    page, same = tmp_path / "r.html", digest == HERE.latents_sha256
    found = dataclasses.replace(HERE, latents_sha256=digest)
    done = run_verify(artifact, monkeypatch, capsys, found, "--report", page)
    assert done.code == (0 if same else 1)
    seen = Seen(page.read_text())
    verdicts = {row[0].partition("sha256")[0].rpartition(" ")[2]: row[4] for row in seen.rows[1:3]}
    assert verdicts == {"latents": "passed" if same else "failed", "frames": "passed"}
    assert ("verification failed" in seen.text) != same and "weights are intact" in seen.text
    assert [one["class"] for one in seen.all("img")] == ["sheet"]
    assert read_manifest(artifact).content_digest in seen.text


def test_a_report_of_what_cannot_be_read(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (artifact / MANIFEST).unlink()
    (artifact / MANIFEST).write_text("{}")
    page = tmp_path / "r.html"
    assert run(wanbuild, ["verify", str(artifact), "--report", str(page)]) == 3
    error = capsys.readouterr().err.removeprefix("error: ").strip()
    assert str(artifact / MANIFEST) in error and error in Seen(page.read_text()).text
    page.unlink()
    inside = artifact / "r.html"
    assert run(wanbuild, ["verify", str(artifact), "--report", str(inside), "--json-errors"]) == 2
    assert str(inside) in json_error(capsys.readouterr().err)["message"] and not inside.exists()
