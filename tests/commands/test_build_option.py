"""``wanrun --build``: the real child builds a shape that the artifact lacks, and the run goes on with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import wanrun
from wanbuild.cli import wanbuild
from wancli.console import run
from wancli.run import wanrun as wanrun_command
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.named import EXECUTABLE, PROGRAM
from wanrun.artifact.overlay import overlay_of
from wanrun.media.write_video import read_metadata

LACKING = "96x64x1-b1-cfg"


@pytest.mark.thorough
def test_a_shape_is_built_and_made(
    artifact_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The nearest profile's own programs are not there, as in the copy of an artifact that is elsewhere.

    A pipeline that was loaded before makes the same video with its weights.
    """
    own = open_artifact(artifact_copy)
    pipeline = wanrun.load(artifact_copy, build=True)
    for one in own.named():
        if one.kind in (PROGRAM, EXECUTABLE):
            own.path(one).unlink()
    before = sorted(artifact_copy.rglob("*"))
    made = tmp_path / "out.npy"
    asked = [str(artifact_copy), "-p", "a fox", "--frames", "1", "--steps", "1", "-o", str(made)]
    assert run(wanrun_command, [*asked, "--build"]) == 0
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
