"""The program calls of the denoising loop, in two forms: one call per step, or one per expert's steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wanrun.denoising.schedule import ExpertRange
from wanrun.denoising.solvers import COLUMNS, SolverTable
from wanrun.denoising.state import State, check_finite, with_noise

LoopProgram = Callable[..., Mapping[str, Any]]
"""An executable bound to its weights. It takes its inputs by name and returns its part of the state."""

Rule = Callable[[int], str]
"""Names a step's program by the step's index: the full program, or a cheaper one of the same form.

The state passes from one expert to the next. A program that reuses the result of an earlier step must not
be an expert's first.
"""

OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class Call:
    """One call of a program of the loop.

    Attributes:
        program: its name.
        arguments: the steps it takes, as the program's inputs.
        first: index of its first step.
        last: one past its last step.
        noise: weight of the noise added to the latents after the call; None for a solver that adds none.
            After the last step it is 0, and the noise is still drawn, as in the reference.
    """

    program: str
    arguments: Mapping[str, Any]
    first: int
    last: int
    noise: float | None = None


def full_program(name: str) -> Rule:
    """Returns the rule that gives every step to one program."""
    return lambda index: name


def step_calls(table: SolverTable, steps: ExpertRange, rule: Rule) -> Iterator[Call]:
    """Yields one call per step, so that progress can be shown and Ctrl-C takes effect between steps.

    Args:
        table: timesteps and coefficients.
        steps: the range of steps.
        rule: names the program of each step.
    """
    for index in range(steps.first, steps.last):
        row, timestep = table.coefficients[index], table.timesteps[index]
        arguments = {"coefficients": row, "timestep": timestep}
        yield Call(rule(index), arguments, index, index + 1, _noise_after(table, index))


def loop_calls(table: SolverTable, steps: ExpertRange, rule: Rule, max_steps: int) -> Iterator[Call]:
    """Yields one call per run of consecutive steps with the same program and no noise added between them.

    Args:
        table: timesteps and coefficients.
        steps: the range of steps.
        rule: names the program of each step.
        max_steps: rows in the programs' tables.
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
    """Returns the weight of the noise after a step; None if the table's solver adds none."""
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
    """Runs the calls in order.

    Args:
        programs: the executables bound to their weights, by name.
        calls: the calls, in the order of their steps.
        state: the state of all programs. Each call takes its program's part as donated buffers, which the
            program's outputs replace. The rest is kept.
        constant: the inputs of every call: the outputs of ``prepare``, and the guidance scale.
        draw: returns the noise that the solver adds between calls, an array of the latents' shape each time.
        record: called after each call with its duration in seconds, synchronised with the device.
        on_call: called after each call.

    Returns:
        The state after the last call.

    Raises:
        WanError: if the latents are not finite after the very first call.
    """
    import jax

    for call in calls:
        started = time.perf_counter()
        state = {**state, **programs[call.program](**constant, **state, **call.arguments)}
        # Drawn while the device computes: 0.08 s for 81 frames of 832x480, 0.17 s for 1280x720 (AMD EPYC).
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
    """Returns the rows followed by zeros, which no step reads."""
    return np.concatenate([rows, np.zeros((length - len(rows), *rows.shape[1:]), rows.dtype)])


def velocity_table(timestep: float) -> SolverTable:
    """Returns a table of one step with σ = 1 that gives m0 = x − v, which reveals the model's output v."""
    row = np.zeros(len(COLUMNS), np.float32)
    row[[COLUMNS.index("sigma"), COLUMNS.index("p_0")]] = 1
    once = np.array([timestep], np.float32)
    return SolverTable("velocity", once, row[None], np.zeros(2), np.zeros(1, np.float32))
