"""Which expert takes which steps, and the table that a generation's options ask for."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.manifests import plain_manifest, with_model
from helpers.refusals import refuses
from wanrun.artifact.parameters import Component
from wanrun.denoising.solvers import solver_table
from wanrun.denoising.steps import ExpertRange, expert_ranges, schedule

NAMES = ("transformer", "transformer_2")
SCALES = {"guidance_scale": 4.0, "guidance_scale_2": 3.0}
LIGHTNING = [1000, 937.5, 833.33, 625]
TWO = with_model(
    plain_manifest(), {"flow_shift": 5.0}, options={"guidance_scale_2": 3.0, "boundary": 0.875}
).changed(components={name: Component(name, {}) for name in NAMES})


def test_the_boundary_may_be_at_a_timestep() -> None:
    """At the boundary itself it is the high-noise expert's turn still."""
    table = solver_table("unipc", 10, 5.0)
    index = 4
    boundary = float(table.timesteps[index]) / 1000
    assert expert_ranges(table, NAMES, {**SCALES, "boundary": boundary}, 1000)[0].last == index + 1


@pytest.mark.parametrize(("boundary", "name"), [(0.0, NAMES[0]), (1.0, NAMES[1])])
def test_one_expert_may_take_all(boundary: float, name: str) -> None:
    table = solver_table("unipc", 7, 3.0)
    scale = 4.0 if name == NAMES[0] else 3.0
    options = {**SCALES, "boundary": boundary}
    assert expert_ranges(table, NAMES, options, 1000) == (ExpertRange.alike(name, 0, 7, scale),)


def test_one_transformer() -> None:
    table = solver_table("euler", 7, 3.0)
    options = {"guidance_scale": 5.0}
    assert expert_ranges(table, NAMES[:1], options, 1000) == (ExpertRange.alike(NAMES[0], 0, 7, 5.0),)
    assert np.all(table.timesteps > 0)


@pytest.mark.parametrize(
    ("shares", "guided"),
    [
        ({}, 10),
        ({"guidance_start": 0.2}, 8),
        ({"guidance_start": 0.25, "guidance_end": 0.79}, 5),
        ({"guidance_start": None, "guidance_end": 0.3}, 3),
    ],
)
def test_some_steps_have_guidance(shares: dict[str, float | None], guided: int) -> None:
    """From one share of all steps to another, of both experts; rounded down."""
    table = solver_table("unipc", 10, 5.0)
    first, second = expert_ranges(table, NAMES, {**SCALES, "boundary": 0.875, **shares}, 1000)
    scales = [*first.guidance_scales, *second.guidance_scales]
    start = int(10 * (shares.get("guidance_start") or 0))
    assert len(scales) == 10 and first.guided + second.guided == guided
    own = [*[4.0] * first.last, *[3.0] * (10 - first.last)]
    assert scales == [own[i] if start <= i < start + guided else 1.0 for i in range(10)]


def test_the_table_of_the_options() -> None:
    options = {**TWO.model.default_options(), "num_steps": 6}
    table, ranges = schedule(options, TWO)
    expected = solver_table("unipc", 6, 5.0)
    np.testing.assert_array_equal(table.coefficients, expected.coefficients)
    assert ranges == expert_ranges(expected, NAMES, options, 1000)
    np.testing.assert_array_equal(schedule({**options, "timesteps": None}, TWO)[0].sigmas, table.sigmas)


@pytest.mark.parametrize("solver", ["euler", "lcm"])
def test_explicit_timesteps(solver: str) -> None:
    """Two steps of each expert, as the published distilled experts are run."""
    options = {**TWO.model.default_options(), "solver": solver, "timesteps": LIGHTNING}
    table, ranges = schedule(options, TWO)
    np.testing.assert_array_equal(table.timesteps, np.array(LIGHTNING, np.float32))
    assert [(part.transformer, part.first, part.last) for part in ranges] == [
        (NAMES[0], 0, 2),
        (NAMES[1], 2, 4),
    ]
    with refuses("invalid_value", what="timesteps", expected=1000, found="625, "):
        schedule({**options, "timesteps": LIGHTNING[::-1]}, TWO)
