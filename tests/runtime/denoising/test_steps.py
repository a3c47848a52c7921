"""Calls of the denoising loop: one a step, or one for all."""

from __future__ import annotations

import numpy as np
import pytest

from wanrun.denoising.solvers import SolverTable, solver_table
from wanrun.denoising.steps import ExpertRange, scan_calls, step_calls, velocity_table

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
