"""What a run compiles here: ``--allow-compile`` for what the machine lacks, ``--build`` for a shape."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from helpers.damage import PROFILE, edit_environment, executable, flip, own
from helpers.manifests import programs_of
from helpers.refusals import refuses
from helpers.terminal import complaints
from wanbuild.cli import wanbuild
from wancli.console import run
from wancli.run import wanrun
from wanrun import load
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.named import EXECUTABLE, PROGRAM
from wanrun.artifact.overlay import overlay_of
from wanrun.executables.compiled_here import keep, kept_file, overlay_folder
from wanrun.media.write_video import read_metadata

LACKING = "96x64x1-b1-cfg"


def _generate(
    artifact: Path, output: Path, capsys: pytest.CaptureFixture[str], *options: object
) -> tuple[list[str], dict[str, Any]]:
    """Runs wanrun here, which has to succeed; returns its warnings and timings."""
    arguments = ["--artifact", artifact, "--prompt", "a fox", "--steps", 2, "--output", output]
    timing = output.with_suffix(".json")
    capsys.readouterr()
    assert (
        run(wanrun, [str(a) for a in (*arguments, "--timing-json", timing, "--no-embedding-cache", *options)])
        == 0
    )
    lines = complaints(capsys.readouterr().err)
    assert all(line.startswith("warning: ") for line in lines), lines
    return lines, json.loads(timing.read_text())


@pytest.mark.thorough
def test_a_mismatch_may_be_compiled_around(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own(artifact, "executables")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    strict, _ = tmp_path / "strict.npy", _generate(artifact, tmp_path / "strict.npy", capsys)
    # The slowest programs are in the overlay already, so that this test compiles only the others.
    slow = {name: executable(artifact, name) for name in ("decode_first", "decode_video")}
    edit_environment(artifact, cpu_features=["warp_drive"])
    manifest = read_manifest(artifact)
    overlay, programs = overlay_folder(manifest, "cpu").make(), programs_of(manifest, PROFILE)
    for name, file in slow.items():
        options = manifest.targets["cpu"].options_of(name)
        keep(kept_file(overlay, programs[name], options, jax.devices("cpu")), file.read_bytes())
    before = sorted(path for path in artifact.rglob("*"))

    warnings, timings = _generate(artifact, tmp_path / "first.npy", capsys, "--allow-compile")
    assert (timings["cache_hits"], timings["cache_misses"]) == (2, 3)
    assert len(warnings) == 4
    assert " warp_drive," in warnings[0]
    compiled = "encode_text_64", "prepare", "denoise_step"
    for name, line in zip(compiled, warnings[1:], strict=True):
        assert re.search(rf" {name} .*\d+\.\d s, .* {overlay}", line)

    warnings, timings = _generate(artifact, tmp_path / "second.npy", capsys, "--allow-compile")
    assert (timings["cache_hits"], timings["cache_misses"]) == (5, 0)
    assert len(warnings) == 1 and " warp_drive," in warnings[0]

    assert sorted(path for path in artifact.rglob("*")) == before
    for name in ("first.npy", "second.npy"):
        assert (tmp_path / name).read_bytes() == strict.read_bytes()


@pytest.mark.slow
def test_a_damaged_executable_may_be_compiled_again(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own(artifact, "executables")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = executable(artifact, "prepare")
    flip(path, 1000)
    warnings, timings = _generate(artifact, tmp_path / "o.npy", capsys, "--allow-compile")
    assert (timings["cache_hits"], timings["cache_misses"]) == (4, 1)
    (line,) = warnings
    assert "compiled prepare" in line and f"the executable {path} is damaged" in line
    path.unlink()
    warnings, timings = _generate(artifact, tmp_path / "p.npy", capsys, "--allow-compile")
    assert (timings["cache_hits"], timings["cache_misses"]) == (5, 0)
    assert warnings == []


def test_an_overlay_that_cannot_be_written(
    toy_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with refuses("unwritable", remedy="set XDG_CACHE_HOME"):
        overlay_folder(read_manifest(toy_artifact), "cpu").make()


@pytest.mark.thorough
def test_a_shape_is_built_and_made(
    artifact_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The nearest profile's own programs are not there, as in the copy of an artifact that is elsewhere.

    A pipeline that was loaded before makes the same video with its weights.
    """
    own = open_artifact(artifact_copy)
    pipeline = load(artifact_copy, build=True)
    for one in own.named():
        if one.kind in (PROGRAM, EXECUTABLE):
            own.path(one).unlink()
    before = sorted(artifact_copy.rglob("*"))
    made = tmp_path / "out.npy"
    asked = [str(artifact_copy), "-p", "a fox", "--frames", "1", "--steps", "1", "-o", str(made)]
    assert run(wanrun, [*asked, "--build"]) == 0
    assert made.is_file() and sorted(artifact_copy.rglob("*")) == before
    assert read_metadata(made)["profile_built"] == "here"
    with pipeline:
        result = pipeline.generate("a fox", num_frames=1, num_steps=1, seed=read_metadata(made)["seed"])
    assert np.array_equal(result.frames[0], np.load(made)) and result.options["profile_built"] == "here"
    capsys.readouterr()
    assert run(wanbuild, ["inspect", "--artifact", str(artifact_copy), "--json"]) == 0
    profiles = json.loads(capsys.readouterr().out)["profiles"]
    assert {name for name, one in profiles.items() if one["built_here"]} == {LACKING}
    (programs,) = (overlay_of(own.manifest).path / "programs").glob(f"{LACKING}*")
    assert list(programs.iterdir())
