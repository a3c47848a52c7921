"""What inspect says of a model: its images and videos, and its schedules."""

from __future__ import annotations

from helpers.manifests import full_manifest
from wanbuild.check import inspect


def test_a_schedule_of_two_experts() -> None:
    """Which of its steps each takes; its figures are in the JSON."""
    manifest = full_manifest()
    (line,) = [
        line
        for line in inspect._model_lines(manifest, inspect.summary(manifest))
        if line.startswith("schedule ")
    ]
    assert line.endswith("; 1 by the high-noise expert, 1 by the other")
    assert inspect.summary(manifest)["schedules"]["2-steps"]["measured"] == {"psnr": 40.5}


def test_what_a_model_takes() -> None:
    """As the command line has it, with the choice of how images are fitted."""
    manifest = full_manifest()
    lines = inspect._model_lines(manifest, inspect.summary(manifest))
    (line,) = [line for line in lines if line.startswith("takes ")]
    inputs, fit = line.removeprefix("takes").split("; ")
    assert [one.split() for one in inputs.split(",")] == [
        ["--image", "(needed)"],
        ["--video", "(needed)"],
        ["--mask", "(in", "mode", "replace)"],
    ]
    assert fit.split() == ["--fit", "stretch|crop|pad"]


def test_a_model_that_can_be_live_says_its_chunks() -> None:
    manifest = full_manifest()
    (line,) = [
        line for line in inspect._model_lines(manifest, inspect.summary(manifest)) if line.startswith("live ")
    ]
    assert [int(word) for word in line.split() if word.isdigit()] == [3, 1]
