"""The denoising loop, in two forms: an executable called once a step, or once for all steps of an expert."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from wanrun.denoising.schedule import ExpertRange
from wanrun.denoising.solvers import COLUMNS, SolverTable
from wanrun.errors import WanError

LOOP_PROGRAMS: Mapping[str, str] = MappingProxyType({"step": "denoise_step", "scan": "denoise_loop"})
"""The forms of the denoising loop, the preferred one first, and the program of each."""

HISTORY = ("last", "m1", "m2")
"""Solver history: the last corrected sample and the two newest data predictions."""

Program = Callable[..., Mapping[str, Any]]
State = Mapping[str, Any]
"""``latents`` (B, C, T, h, w) and ``history``, a dict of arrays like it."""

OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class Call:
    """One call of a program of the loop.

    Attributes:
        arguments: which steps it takes, as the program's form wants to be told.
        first: index of its first step.
        last: one past its last step.
    """

    arguments: Mapping[str, Any]
    first: int
    last: int


def step_calls(table: SolverTable, steps: ExpertRange) -> Iterator[Call]:
    """A call of ``denoise_step`` for every step: what comes between can be seen, and interrupted."""
    for index in range(steps.first, steps.last):
        row, timestep = table.coefficients[index], table.timesteps[index]
        yield Call({"coefficients": row, "timestep": timestep}, index, index + 1)


def loop_call(table: SolverTable, steps: ExpertRange, max_steps: int) -> Call:
    """The one call of ``denoise_loop`` for an expert's steps.

    Args:
        table: timesteps and coefficients.
        steps: which of its steps.
        max_steps: rows that the program's table has.
    """
    arguments = {
        "coefficients": _padded(table.coefficients, max_steps),
        "timesteps": _padded(table.timesteps, max_steps),
        "first": np.int32(steps.first),
        "last": np.int32(steps.last),
    }
    return Call(arguments, steps.first, steps.last)


def run_calls(
    program: Program,
    calls: Iterable[Call],
    state: State,
    constant: Mapping[str, Any],
    record: Callable[[Call, float], None],
    on_call: Callable[[Call], None],
) -> State:
    """Makes one call after the other.

    Args:
        program: the executable with its weights, taking its inputs by name.
        calls: in the order of their steps.
        state: latents and solver history; donated.
        constant: what every call takes: what ``prepare`` returned, and the guidance scale.
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
        state = program(**constant, **state, **call.arguments)
        jax.block_until_ready(state)
        record(call, time.perf_counter() - started)
        if call.first == 0:
            check_finite(state, "after the first step" if call.last == 1 else f"after {call.last} steps")
        on_call(call)
    return state


def _padded(rows: np.ndarray, length: int) -> np.ndarray:
    """Rows followed by zeros, which no step reads."""
    return np.concatenate([rows, np.zeros((length - len(rows), *rows.shape[1:]), rows.dtype)])


def start_state(noise: np.ndarray, dtype: Any = np.float32) -> dict[str, Any]:
    """Latents and an empty solver history: what the first step takes.

    Args:
        noise: float32 (B, C, T, h, w).
        dtype: what the program keeps them in.
    """
    latents = noise.astype(dtype, copy=False)
    return {"latents": latents, "history": {name: np.zeros_like(latents) for name in HISTORY}}


def final_latents(state: State) -> np.ndarray:
    """The latents of a state on the host, float32.

    Raises:
        WanError: if they are not finite.
    """
    check_finite(state, "at the end")
    return np.asarray(state["latents"]).astype(np.float32, copy=False)


def velocity_table(timestep: float) -> SolverTable:
    """One step with σ = 1 that returns the data prediction m0 = x − v: it shows the model's output v."""
    row = np.zeros(len(COLUMNS), np.float32)
    row[[COLUMNS.index("sigma"), COLUMNS.index("p_0")]] = 1
    return SolverTable("velocity", np.array([timestep], np.float32), row[None], np.zeros(2))


def check_finite(state: State, when: str) -> None:
    """Raises WanError for NaN or infinity: checked early, and before anything is decoded from them."""
    latents = np.asarray(state["latents"]).astype(np.float32, copy=False)
    wrong = latents.size - np.count_nonzero(np.isfinite(latents))
    if wrong:
        raise WanError(
            f"the latents are not finite {when}",
            expected="numbers",
            found=f"{wrong} NaN or infinite of {latents.size} values",
            remedy="check the weights with wanbuild verify, or build with --dtype float32",
        )
