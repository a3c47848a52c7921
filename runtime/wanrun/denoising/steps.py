"""The calls of the denoising loop, in two forms: a call for every step, or one for all steps of an expert."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from wanrun.denoising.schedule import ExpertRange
from wanrun.denoising.solvers import COLUMNS, SolverTable
from wanrun.denoising.state import State, check_finite, with_noise

LOOP_PROGRAMS: Mapping[str, str] = MappingProxyType({"step": "denoise_step", "scan": "denoise_loop"})
"""The forms of the denoising loop, the preferred one first, and the full program of each."""

LoopProgram = Callable[..., Mapping[str, Any]]
"""An executable with its weights. It takes its inputs by name and returns its part of the state."""

Rule = Callable[[int], str]
"""Names the program of a step by the step's index: the full program, or a cheaper one of the same form.

The state goes on from one expert to the next. A program that reuses what an earlier step left there must not
be an expert's first.
"""

OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class Call:
    """One call of a program of the loop.

    Attributes:
        program: its name.
        arguments: which steps it takes, in the form that the program has them.
        first: index of its first step.
        last: one past its last step.
        noise: weight of the noise that is added to the latents after it; None for a solver that adds none.
            After the last step it is 0, and the noise is drawn, as the reference does.
    """

    program: str
    arguments: Mapping[str, Any]
    first: int
    last: int
    noise: float | None = None


def full_program(loop: str) -> Rule:
    """The rule that gives every step to the full program of a form of the loop."""
    return lambda index: LOOP_PROGRAMS[loop]


def step_calls(table: SolverTable, steps: ExpertRange, rule: Rule) -> Iterator[Call]:
    """A call for every step: what comes between can be seen, and interrupted.

    Args:
        table: timesteps and coefficients.
        steps: which of its steps.
        rule: names the program of each.
    """
    for index in range(steps.first, steps.last):
        row, timestep = table.coefficients[index], table.timesteps[index]
        arguments = {"coefficients": row, "timestep": timestep}
        yield Call(rule(index), arguments, index, index + 1, _noise_after(table, index))


def loop_calls(table: SolverTable, steps: ExpertRange, rule: Rule, max_steps: int) -> Iterator[Call]:
    """A call for all steps in a row that have the same program, and no noise to be added between them.

    Args:
        table: timesteps and coefficients.
        steps: which of its steps.
        rule: names the program of each.
        max_steps: rows that the programs' tables have.
    """
    coefficients, timesteps = _padded(table.coefficients, max_steps), _padded(table.timesteps, max_steps)
    names = [rule(index) for index in range(steps.first, steps.last)]
    first = steps.first
    for last, (name, following) in enumerate(zip(names, [*names[1:], None], strict=True), steps.first + 1):
        noise = _noise_after(table, last - 1)
        if name == following and noise is None:
            continue
        rows = {"coefficients": coefficients, "timesteps": timesteps}
        yield Call(name, {**rows, "first": np.int32(first), "last": np.int32(last)}, first, last, noise)
        first = last


def _noise_after(table: SolverTable, index: int) -> float | None:
    """The weight of the noise after a step; None for a table without any."""
    return float(table.noise[index]) if table.noise.any() else None


def run_calls(
    programs: Mapping[str, LoopProgram],
    calls: Iterable[Call],
    state: State,
    constant: Mapping[str, Any],
    draw: Callable[[Sequence[int]], np.ndarray],
    record: Callable[[Call, float], None],
    on_call: Callable[[Call], None],
) -> State:
    """Makes one call after the other.

    Args:
        programs: the executables with their weights, by name.
        calls: in the order of their steps.
        state: of all the programs. Each call takes its program's part, which is donated, and puts what the
            program returns in its place. The rest is kept.
        constant: what every call takes: what ``prepare`` returned, and the guidance scale.
        draw: gives the noise that the solver adds between calls, an array of the latents' shape each time.
        record: told after each call how many seconds it took, synchronised with the device.
        on_call: told that it was made.

    Returns:
        The state after the last call.

    Raises:
        WanError: if the latents are not finite after the very first call.
    """
    import jax

    for call in calls:
        started = time.perf_counter()
        state = {**state, **programs[call.program](**constant, **state, **call.arguments)}
        # Drawn while the device computes: 0.08 s for 81 frames of 832x480, 0.17 s of 1280x720 (AMD EPYC).
        noise = None if call.noise is None else draw(state["latents"].shape)
        jax.block_until_ready(state)
        record(call, time.perf_counter() - started)
        if call.first == 0:
            check_finite(state, "after the first step" if call.last == 1 else f"after {call.last} steps")
        if call.noise and noise is not None:
            state = {**state, "latents": with_noise(state["latents"], call.noise, noise)}
        on_call(call)
    return state


def _padded(rows: np.ndarray, length: int) -> np.ndarray:
    """Rows followed by zeros, which no step reads."""
    return np.concatenate([rows, np.zeros((length - len(rows), *rows.shape[1:]), rows.dtype)])


def velocity_table(timestep: float) -> SolverTable:
    """One step with σ = 1 that returns the data prediction m0 = x − v: it shows the model's output v."""
    row = np.zeros(len(COLUMNS), np.float32)
    row[[COLUMNS.index("sigma"), COLUMNS.index("p_0")]] = 1
    once = np.array([timestep], np.float32)
    return SolverTable("velocity", once, row[None], np.zeros(2), np.zeros(1, np.float32))
