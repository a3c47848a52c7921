"""Steps of the denoising loop: their calls, and which of them an expert, guidance and a third pass take."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.manifests import plain_manifest, with_model
from helpers.refusals import refuses
from wanrun.artifact.guiders import GUIDERS
from wanrun.artifact.parameters import Component
from wanrun.denoising.boundary import boundary_between
from wanrun.denoising.guided_steps import guided_steps, skipping_steps
from wanrun.denoising.solvers import SolverTable, solver_table
from wanrun.denoising.steps import (
    ExpertRange,
    expert_ranges,
    scan_calls,
    schedule,
    step_calls,
    velocity_table,
)

# --- steps ---


UNIPC, LCM = solver_table("unipc", 6, 3.0), solver_table("lcm", 4, 3.0)
MIDDLE = ExpertRange("transformer", 1, 5, (1.0, 4.0, 4.0, 3.0))


def test_a_call_for_every_step() -> None:
    calls = list(step_calls(UNIPC, MIDDLE, guidance=True))
    assert [(call.first, call.last) for call in calls] == [(1, 2), (2, 3), (3, 4), (4, 5)]
    for call in calls:
        assert call.arguments["timestep"] == UNIPC.timesteps[call.first]
        assert np.array_equal(call.arguments["coefficients"], UNIPC.coefficients[call.first])
        assert call.noise is None
    scales = [call.arguments["guidance_scale"] for call in calls]
    assert scales == list(MIDDLE.guidance_scales) and {one.dtype for one in scales} == {np.dtype("float32")}
    without = next(step_calls(UNIPC, MIDDLE, guidance=False))
    assert without.arguments.keys() == {"coefficients", "timestep"}


def test_a_call_for_all_steps_in_a_row() -> None:
    calls = list(scan_calls(UNIPC, MIDDLE, 10, guidance=True))
    assert [(call.first, call.last) for call in calls] == [(1, 5)]
    for call in calls:
        assert (call.arguments["first"], call.arguments["last"]) == (call.first, call.last)
        assert call.arguments["first"].dtype == np.int32 and call.noise is None
        # The whole table, with rows of zeros up to what the program was built for.
        for name, rows in (("coefficients", UNIPC.coefficients), ("timesteps", UNIPC.timesteps)):
            padded = call.arguments[name]
            assert len(padded) == 10 and padded.dtype == np.float32
            assert np.array_equal(padded[:6], rows) and not padded[6:].any()
        scales = call.arguments["guidance_scales"]
        assert scales.dtype == np.float32 and scales.tolist() == [1, *MIDDLE.guidance_scales, 1, 0, 0, 0, 0]


def test_a_flow_map_is_told_where_each_step_ends() -> None:
    """At the next step's timestep, also where that is another expert's, and the last one at 0."""
    ends = [*UNIPC.timesteps[1:].tolist(), 0]
    calls = step_calls(UNIPC, MIDDLE, False, flow_map=True)
    assert [call.arguments["next_timestep"] for call in calls] == ends[1:5]
    (call,) = scan_calls(UNIPC, MIDDLE, 8, False, flow_map=True)
    found = call.arguments["next_timesteps"]
    assert found.dtype == np.float32 and found.tolist() == [*ends, 0, 0]


@pytest.mark.parametrize("loop", ["step", "scan"])
def test_noise_ends_a_call(loop: str) -> None:
    whole = ExpertRange.alike("transformer", 0, 4, 1.0)
    calls = list(step_calls(LCM, whole, True) if loop == "step" else scan_calls(LCM, whole, 8, True))
    assert [(call.first, call.last) for call in calls] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [call.noise for call in calls] == LCM.noise.tolist()
    assert calls[-1].noise == 0 and all(call.noise for call in calls[:-1])


def test_one_step_that_shows_the_model_s_output() -> None:
    """m0 = x - v, and the next sample is m0."""
    table: SolverTable = velocity_table(750.0)
    assert table.timesteps.tolist() == [750.0] and not table.noise.any()
    assert table.coefficients.tolist() == [[1, 0, 0, 0, 0, 0, 0, 1, 0]]


# --- guidance ---


SKIPPING = {**GUIDERS["skip-layer"].options, "skip_layers": [1]}


@pytest.mark.parametrize(
    ("total", "shares", "expected"),
    [
        (50, {}, range(1, 10)),
        (30, {}, range(1, 6)),
        (4, {}, range(0)),
        (10, {"skip_start": 0.0, "skip_end": 1.0}, range(1, 10)),
        (10, {"skip_start": 0.29, "skip_end": 0.55}, range(3, 5)),
    ],
)
def test_the_steps_of_a_third_pass(total: int, shares: dict[str, float], expected: range) -> None:
    """Those for which diffusers' guider says int(start · total) < step < int(stop · total)."""
    assert list(skipping_steps({**SKIPPING, **shares}, total)) == list(expected)
    assert not skipping_steps({"guider": "cfg-zero", "zero_steps": 1}, total)


def test_a_step_without_guidance_has_no_third_pass() -> None:
    """Of two experts, each with its own steps; rows of a step say which layers."""
    options = {"guidance_scale": 4.0, "guidance_scale_2": 3.0, "boundary": 0.875, "guidance_start": 0.2}
    options |= {"guider": "skip-layer", **SKIPPING, "skip_end": 0.8}
    table = solver_table("unipc", 10, 5.0)
    first, second = expert_ranges(table, ("transformer", "transformer_2"), options, 1000)
    assert guided_steps(options, 10) == (2, 10)
    assert [*first.skip_scales, *second.skip_scales] == [0, 0, *[2.8] * 6, 0, 0]
    assert first.skipping + second.skipping == 6 and first.skip_layers == second.skip_layers == (1,)
    shapes = {"guidance_projection": (), "skip_scale": (), "skip_layers": (3,)}
    third = list(step_calls(table, first, True, shapes))[2].arguments
    assert third["skip_layers"].tolist() == [0, 1, 0] and third["skip_scale"].tolist() == pytest.approx(2.8)
    assert third["guidance_projection"] == 0


# --- schedule ---


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


@pytest.mark.parametrize(
    ("names", "options", "name", "scale"),
    [
        (NAMES, {**SCALES, "boundary": 0.0}, NAMES[0], 4.0),
        (NAMES, {**SCALES, "boundary": 1.0}, NAMES[1], 3.0),
        (NAMES[:1], {"guidance_scale": 5.0}, NAMES[0], 5.0),
    ],
)
def test_one_expert_may_take_all(
    names: tuple[str, ...], options: dict[str, float], name: str, scale: float
) -> None:
    found = expert_ranges(solver_table("unipc", 7, 3.0), names, options, 1000)
    assert found == (ExpertRange.alike(name, 0, 7, scale),)


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


# --- boundary ---


@pytest.mark.parametrize(
    ("own", "steps", "expected"), [(0.875, 4, 0.875), (0.875, 1, 0.875), (0.1, 4, 0.885), (0.1, 2, 0.916)]
)
def test_a_boundary_for_a_short_run(own: float, steps: int, expected: float) -> None:
    """The model's own if both experts take steps, else the middle: of 999, 937, 833, 625 or of 999, 833.

    The model's default timesteps are for another number of steps.
    """
    plain = with_model(TWO, options={**TWO.model.options, "boundary": own})
    for manifest in (plain, with_model(plain, {"timesteps": LIGHTNING})):
        assert boundary_between(manifest, steps) == pytest.approx(expected)


def test_a_boundary_for_another_solver() -> None:
    """Of 1000, 667, 334, 1: the boundary between the two in the middle."""
    manifest = with_model(TWO, options={**TWO.model.options, "boundary": 0.0})
    assert boundary_between(manifest, 4, solver="lcm", flow_shift=1.0) == pytest.approx(0.5005)
