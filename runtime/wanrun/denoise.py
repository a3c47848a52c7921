"""The denoising loop, in two forms: an executable called once a step, or once for all steps of an expert."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from wanrun.errors import WanError
from wanrun.experts import Segment
from wanrun.solvers import COLUMNS, SolverTable
from wanrun.timing import Timings

HISTORY = ("last", "m1", "m2")
"""Solver history: the last corrected sample and the two newest data predictions."""

Program = Callable[..., Mapping[str, Any]]
State = Mapping[str, Any]
"""``latents`` (B, C, T, h, w) and ``history``, a dict of arrays like it."""

OnStep = Callable[[int, int], None]


class Form(Protocol):
    """Takes the steps of a segment.

    Args:
        program: the executable with its weights, taking its inputs by name.
        state: latents and solver history; donated.
        table: timesteps and coefficients.
        segment: which of its steps.
        constant: what every step takes: what ``prepare`` returned, and the guidance scale.
        timings: where steps are recorded, synchronised with the device.
        on_step: told after each call how many of how many steps are done.

    Returns:
        The state after the segment's last step.
    """

    def __call__(
        self,
        program: Program,
        state: State,
        table: SolverTable,
        segment: Segment,
        constant: Mapping[str, Any],
        timings: Timings,
        on_step: OnStep,
    ) -> State: ...


def run_steps(
    program: Program,
    state: State,
    table: SolverTable,
    segment: Segment,
    constant: Mapping[str, Any],
    timings: Timings,
    on_step: OnStep,
) -> State:
    """One call of ``denoise_step`` a step: what comes between can be seen, and interrupted. See ``Form``.

    Raises:
        WanError: if the latents are not finite after the very first step.
    """
    import jax

    for index in range(segment.first, segment.last):
        started = time.perf_counter()
        row, timestep = table.coefficients[index], table.timesteps[index]
        state = program(**constant, **state, timestep=timestep, coefficients=row)
        jax.block_until_ready(state)
        timings.step(time.perf_counter() - started)
        if index == 0:
            timings.mark_first_step()
            check_finite(state, "after the first step")
        on_step(index + 1, len(table.timesteps))
    return state


def run_loop(
    program: Program,
    state: State,
    table: SolverTable,
    segment: Segment,
    constant: Mapping[str, Any],
    timings: Timings,
    on_step: OnStep,
    max_steps: int,
) -> State:
    """One call of ``denoise_loop`` for the whole segment. See ``Form``.

    Args:
        max_steps: rows that the program's table has.

    Raises:
        WanError: if the latents are not finite after the first segment.
    """
    import jax

    count = segment.last - segment.first
    started = time.perf_counter()
    state = program(
        **constant,
        **state,
        coefficients=_padded(table.coefficients, max_steps),
        timesteps=_padded(table.timesteps, max_steps),
        first=np.int32(segment.first),
        last=np.int32(segment.last),
    )
    jax.block_until_ready(state)
    timings.steps(count, time.perf_counter() - started)
    if segment.first == 0:
        timings.mark_first_step()
        check_finite(state, f"after {count} steps")
    on_step(segment.last, len(table.timesteps))
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
