"""What inspect says of schedules."""

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
