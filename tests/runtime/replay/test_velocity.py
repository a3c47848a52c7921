"""The velocity for fixed noise: of every expert, the same in each form of the loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wanrun.executables.tolerance import relative_error
from wanrun.generation.load import load
from wanrun.replay.golden import recorded_generation
from wanrun.replay.velocity import Start, velocity


@pytest.fixture(scope="module")
def found(toy_artifact: Path) -> dict[str, np.ndarray]:
    """Velocities of the toy by what is asked for."""
    with load(toy_artifact, embeddings="none") as pipeline:
        generation = recorded_generation(pipeline)
        start = Start.of(pipeline, generation, generation.read_media())
        session = pipeline.session(pipeline.profile)
        other = Start(start.experts, start.embeddings[::-1], start.conditions, start.noise)
        return {
            "step": velocity(session, start, "step"),
            "scan": velocity(session, start, "scan"),
            "same tables": velocity(session, replace(start, table=lambda table: table), "step"),
            "no rotation": velocity(session, replace(start, table=np.zeros_like), "step"),
            "prompts exchanged": velocity(session, other, "step"),
            "noise": start.noise[None],
        }


def test_forms_and_tables(found: dict[str, np.ndarray]) -> None:
    assert found["step"].shape == found["noise"].shape == (1, 1, 16, 3, 8, 12)
    assert relative_error(found["scan"], found["step"]) < 1e-6
    assert np.array_equal(found["step"], found["same tables"])
    assert relative_error(found["no rotation"], found["step"]) > 1e-2
    assert relative_error(found["noise"], found["step"]) > 0.5


def test_both_halves_of_guidance_count_alike(found: dict[str, np.ndarray]) -> None:
    assert relative_error(found["prompts exchanged"], found["step"]) < 1e-6
