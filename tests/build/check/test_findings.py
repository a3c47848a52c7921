"""``wanbuild inspect``, ``attest`` and ``verify``: whose report has the verdicts of ``compare``."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from helpers.damage import PROFILE
from helpers.elsewhere import TARGET, build_elsewhere, put_golden, record_verdict
from helpers.fake_pipeline import Run
from helpers.manifests import full_manifest, plain_manifest, plain_parameter, plain_target, program_set
from helpers.pages import Seen
from helpers.refusals import json_error
from wanbuild.check import verify
from wanbuild.check.attest import attest
from wanbuild.check.findings import Findings, measured, verification
from wanbuild.check.inspect import summary, table
from wanbuild.cli import wanbuild
from wancli.console import run
from wanhub.signature import SIGNATURE
from wanreport.page import html
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import MANIFEST, NEEDED, read_manifest
from wanrun.artifact.parameters import Component
from wanrun.errors import ArtifactError, VerificationError
from wanrun.files import user_cache
from wanrun.replay.golden import Golden, compare
from wanrun.timing.timings import Timings
from wanrun.trust import trial
from wanrun.trust.recorded import known_verdict
from wanrun.trust.verdict import Verdict

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


# ``wanbuild attest``: what was built elsewhere is tried here, and its verdict goes into the artifact.


PASSED = Verdict(outcome="passed", reason="they agree", device_kind="CPU v9", platform_version="1")
REFUSED = msgspec.structs.replace(PASSED, outcome="refused")


def finds(monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> None:
    """Takes the place of the child, whose verdict is this."""
    code = f"import sys; open(sys.argv[-1], 'wb').write({verdict.encoded()!r})"
    monkeypatch.setattr(trial, "CHILD", (sys.executable, "-c", code))


@pytest.mark.slow
def test_what_is_right_is_recorded_until_it_is_refused(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    finds(monkeypatch, PASSED)
    attest(elsewhere, [], False, lines.append)
    assert open_artifact(elsewhere).manifest.verdicts == {} and len(lines) == 2
    (elsewhere / SIGNATURE).write_text("of the manifest before")
    attest(elsewhere, [PROFILE], True, lines.append)
    artifact = open_artifact(elsewhere)
    ((key, one),) = artifact.manifest.verdicts.items()
    assert (one.target, one.profile, one.device_kind) == (TARGET, PROFILE, "CPU v9")
    assert artifact.whole(artifact.named()) and SIGNATURE in lines[-1]
    assert summary(artifact.manifest)["targets"][TARGET]["attested"][0]["device_kind"] == "CPU v9"
    assert any("CPU v9," in line for line in table(artifact.manifest))

    before = artifact.changed(verdicts={key: msgspec.structs.replace(one, made="2020-01-01T00:00:00Z")})
    before.write()
    attest(elsewhere, [PROFILE], True, lines.append)  # the same verdict: a signature still fits
    assert open_artifact(elsewhere).manifest == before.manifest

    (kept,) = (user_cache() / "verdicts").iterdir()
    assert kept.stem == key
    kept.unlink()
    finds(monkeypatch, msgspec.structs.replace(REFUSED, keep=False))  # the device was busy
    with pytest.raises(ArtifactError, match="1 of 1"):
        attest(elsewhere, [], True, lines.append)
    assert list(open_artifact(elsewhere).manifest.verdicts) == [key]
    facts = record_verdict(elsewhere, PASSED, driver="580.1")  # of another kind of machine: it stays
    finds(monkeypatch, REFUSED)
    with pytest.raises(ArtifactError, match="1 of 1"):
        attest(elsewhere, [], True, lines.append)
    artifact = open_artifact(elsewhere)
    assert known_verdict(artifact, facts) is not None and key not in artifact.manifest.verdicts
    assert [path.name for path in (elsewhere / "verdicts").iterdir()] == [
        Path(one.file).name for one in artifact.manifest.verdicts.values()
    ]


def test_what_is_compiled_where_it_runs_needs_none(artifact: Path) -> None:
    lines: list[str] = []
    attest(artifact, [], False, lines.append)
    assert len(lines) == 1 and "target cpu" in lines[0]
    with pytest.raises(ArtifactError, match="'x'"):
        attest(artifact, ["x"], False, lines.append)
    build_elsewhere(artifact, beside=True, variables={"XLA_FLAGS": "--xla_x=1"})
    with pytest.raises(ArtifactError, match="XLA_FLAGS"):
        attest(artifact, [], False, lines.append)


# What inspect says of a model.


def test_a_model_of_every_kind() -> None:
    """Its images and videos as the command line has them, the steps of two experts, and its live chunks."""
    manifest = full_manifest()
    lines = {line.split()[0]: line for line in table(manifest) if line.strip() == line != ""}
    inputs, fit = lines["takes"].removeprefix("takes").split("; ")
    needed = [one.split() for one in inputs.split(",")]
    assert needed == [["--image", "(needed)"], ["--video", "(needed)"], ["--mask", "(in", "mode", "replace)"]]
    assert fit.split() == ["--fit", "stretch|crop|pad"]
    scales = re.search("guidance ([0-9.]+) and ([0-9.]+) below boundary ([0-9.]+)", lines["defaults"])
    assert scales is not None and scales.groups() == ("4", "3", "0.9")
    assert lines["schedule"].endswith("; 1 by the high-noise expert, 1 by the other")
    assert summary(manifest)["schedules"]["2-steps"]["measured"] == {"psnr": 40.5}
    assert [int(word) for word in lines["live"].split() if word.isdigit()] == [3, 1]


@pytest.mark.slow
def test_inspect(toy_artifact: Path) -> None:
    runner = CliRunner()
    text = runner.invoke(wanbuild, ["inspect", "--artifact", str(toy_artifact)])
    assert text.exit_code == 0
    for part in ("wan2.1-t2v", "96x64x9-b1-cfg", "transformer", "text_encoder", "vae", "denoise_step"):
        assert part in text.output
    data = json.loads(runner.invoke(wanbuild, ["inspect", "--artifact", str(toy_artifact), "--json"]).output)
    manifest = read_manifest(toy_artifact)
    assert data["content_digest"] == manifest.content_digest
    assert data["components"]["transformer"]["bytes"] == manifest.components["transformer"].nbytes
    path = "blocks/attn1/to_q/weight"
    assert data["components"]["transformer"]["shapes"][path] == ["float32", [3, 40, 40]]
    assert data["components"]["transformer"]["axes"][path] == ["layers", "rotary_heads", "embed"]


def test_inspect_shows_a_mesh() -> None:
    """Its axes in the order of the devices, what they cut, and what one device holds of each component."""
    parameter = msgspec.structs.replace(plain_parameter((8, 6), "float32"), axes=("heads", "embed"))
    components = dict.fromkeys(NEEDED, Component("weights/c", {"w": parameter}))
    rules = {"heads": ("tensor",), "embed": ("fsdp",)}
    lines = []
    for mesh in ({}, {"context": 2, "data": 2}, {"data": 2, "tensor": 4}):
        programs = msgspec.structs.replace(program_set({}), mesh=mesh, rules=rules if mesh else {})
        target = plain_target(program_set=programs.key)
        manifest = plain_manifest(
            components=components,
            program_sets={programs.key: programs},
            targets={"cpu": target},
            source={"repository": "r", "files": {}},
        )
        said = summary(manifest)["targets"]["cpu"]
        nbytes = 192 // mesh.get("tensor", 1)
        expected = {"mesh": mesh, "rules": {k: list(v) for k, v in rules.items()}} if mesh else {}
        assert {key: said[key] for key in ("mesh", "rules") if key in said} == expected
        assert said.get("bytes_per_device") == (dict.fromkeys(NEEDED, nbytes) if mesh else None)
        lines.append([line for line in table(manifest) if line.startswith("  ")])
    assert lines[0] == [] and [re.findall(r"[a-z_]+[= ]\d+|: \d+", " ".join(one)) for one in lines[1:]] == [
        [
            "data=2",
            axis,
            f": {devices}",
            *(f"{name} {nbytes}" for name in ("text_encoder", "transformer", "vae")),
        ]
        for axis, devices, nbytes in (("context=2", 4, 192), ("tensor=4", 8, 48))
    ]
    assert "heads" not in " ".join(lines[1]) and "heads over tensor" in " ".join(lines[2])
