"""Calls of the denoising loop: one a step, or one for all in a row of a program; the state runs through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from wanrun.denoising.schedule import ExpertRange
from wanrun.denoising.solvers import SolverTable, solver_table
from wanrun.denoising.steps import Call, full_program, loop_calls, run_calls, step_calls, velocity_table
from wanrun.errors import WanError

UNIPC, LCM = solver_table("unipc", 6, 3.0), solver_table("lcm", 4, 3.0)
MIDDLE = ExpertRange("transformer", 1, 5, 4.0)


def cheap_in_between(index: int) -> str:
    """Steps 2 and 3 run a cheaper program."""
    return "reuse" if index in (2, 3) else "full"


def test_a_call_for_every_step() -> None:
    calls = list(step_calls(UNIPC, MIDDLE, cheap_in_between))
    assert [(call.program, call.first, call.last) for call in calls] == [
        ("full", 1, 2),
        ("reuse", 2, 3),
        ("reuse", 3, 4),
        ("full", 4, 5),
    ]
    for call in calls:
        assert call.arguments["timestep"] == UNIPC.timesteps[call.first]
        assert np.array_equal(call.arguments["coefficients"], UNIPC.coefficients[call.first])
        assert call.noise is None


def test_the_full_program_takes_every_step() -> None:
    assert {full_program("full")(index) for index in range(9)} == {"full"}


def test_a_call_for_all_steps_in_a_row() -> None:
    calls = list(loop_calls(UNIPC, MIDDLE, cheap_in_between, max_steps=10))
    assert [(call.program, call.first, call.last) for call in calls] == [
        ("full", 1, 2),
        ("reuse", 2, 4),
        ("full", 4, 5),
    ]
    for call in calls:
        assert (call.arguments["first"], call.arguments["last"]) == (call.first, call.last)
        assert call.arguments["first"].dtype == np.int32 and call.noise is None
        # The whole table, with rows of zeros up to what the program was built for.
        for name, rows in (("coefficients", UNIPC.coefficients), ("timesteps", UNIPC.timesteps)):
            padded = call.arguments[name]
            assert len(padded) == 10 and padded.dtype == np.float32
            assert np.array_equal(padded[:6], rows) and not padded[6:].any()


@pytest.mark.parametrize("loop", ["step", "scan"])
def test_noise_ends_a_call(loop: str) -> None:
    whole, rule = ExpertRange("transformer", 0, 4, 1.0), full_program(loop)
    calls = list(step_calls(LCM, whole, rule) if loop == "step" else loop_calls(LCM, whole, rule, 8))
    assert [(call.first, call.last) for call in calls] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [call.noise for call in calls] == LCM.noise.tolist()
    assert calls[-1].noise == 0 and all(call.noise for call in calls[:-1])


class Programs:
    """Two programs: one doubles the latents and notes them in ``residual``, one adds what was noted."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def full(self, **arguments: Any) -> dict[str, Any]:
        self.seen.append(arguments)
        return {"latents": arguments["latents"] * 2, "residual": arguments["latents"]}

    def reuse(self, **arguments: Any) -> dict[str, Any]:
        self.seen.append(arguments)
        return {"latents": arguments["latents"] + arguments["residual"]}

    def run(self, calls: Sequence[Call], start: float = 1.0, drawn: float = 0.5) -> tuple[Any, list[Any]]:
        """Makes calls over latents of one value; returns the state, and what was told of it."""
        told: list[Any] = []
        state = run_calls(
            {"full": self.full, "reuse": self.reuse},
            calls,
            {"latents": np.full((1, 2), start, np.float32), "kept": "as it is"},
            {"guidance_scale": 3.0},
            lambda shape: np.full(shape, drawn, np.float32),
            lambda call, seconds: told.append(("seconds", call.first, seconds >= 0)),
            lambda call: told.append(("call", call.first)),
        )
        return state, told


def test_each_program_puts_its_part_into_the_state() -> None:
    programs = Programs()
    calls = [Call("full", {"a": 1}, 0, 1), Call("reuse", {"a": 2}, 1, 2), Call("reuse", {"a": 3}, 2, 4)]
    state, told = programs.run(calls)
    assert state["latents"].tolist() == [[4, 4]]  # 2, 2 + 1, 3 + 1
    assert state["kept"] == "as it is" and state["residual"].tolist() == [[1, 1]]
    assert [seen["a"] for seen in programs.seen] == [1, 2, 3]
    assert all(seen["guidance_scale"] == 3.0 for seen in programs.seen)
    assert told == [item for first in (0, 1, 2) for item in (("seconds", first, True), ("call", first))]


def test_noise_is_added_after_a_call() -> None:
    calls = [Call("full", {}, 0, 1, noise=4.0), Call("full", {}, 1, 2, noise=0.0)]
    state, _ = Programs().run(calls)
    assert state["latents"].tolist() == [[8, 8]]  # (1 · 2 + 4 · 0.5) · 2, and no noise after the last


@pytest.mark.parametrize(("last", "when"), [(1, "after the first step"), (4, "after 4 steps")])
def test_latents_that_are_not_finite_are_found_early(last: int, when: str) -> None:
    programs = Programs()
    with pytest.raises(WanError, match=f"the latents are not finite {when}"):
        programs.run([Call("full", {}, 0, last), Call("full", {}, last, last + 1)], start=np.inf)
    assert len(programs.seen) == 1


def test_one_step_that_shows_the_model_s_output() -> None:
    """m0 = x - v, and the next sample is m0."""
    table: SolverTable = velocity_table(750.0)
    assert table.timesteps.tolist() == [750.0] and not table.noise.any()
    assert table.coefficients.tolist() == [[1, 0, 0, 0, 0, 0, 0, 1, 0]]
