"""The denoising loop: one executable, called with one row of the solver's table after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from wanrun.errors import WanError
from wanrun.solvers import COLUMNS, SolverTable
from wanrun.timing import Timings

HISTORY = ("last", "m1", "m2")
"""Solver history: the last corrected sample and the two newest data predictions."""

Step = Callable[..., Mapping[str, Any]]
OnStep = Callable[[int, int], None]


def denoise(
    step: Step,
    noise: np.ndarray,
    table: SolverTable,
    constant: Mapping[str, Any],
    timings: Timings,
    on_step: OnStep,
) -> np.ndarray:
    """Runs every row of a solver's table.

    Args:
        step: the ``denoise_step`` program with its weights, taking its inputs by name.
        noise: initial latents, float32 (B, C, T, h, w); only read.
        table: timesteps and coefficients.
        constant: what every step takes: what ``prepare`` returned, and the guidance scale.
        timings: where each step is recorded, synchronised with the device.
        on_step: told after each step how many of how many are done.

    Returns:
        The final latents, float32 (B, C, T, h, w).

    Raises:
        WanError: if the latents are not finite after the first or the last step.
    """
    import jax

    state: Mapping[str, Any] = start_state(noise)
    total = len(table.timesteps)
    for index, (timestep, row) in enumerate(zip(table.timesteps, table.coefficients, strict=True)):
        started = time.perf_counter()
        state = step(**constant, **state, timestep=np.float32(timestep), coefficients=row)
        jax.block_until_ready(state)
        timings.step(time.perf_counter() - started)
        if index == 0:
            timings.mark_first_step()
            _check_finite(np.asarray(state["latents"]), "after the first step")
        on_step(index + 1, total)
    final = np.asarray(state["latents"])
    _check_finite(final, "at the end")
    return final


def start_state(noise: np.ndarray) -> dict[str, Any]:
    """Latents and an empty solver history: what the first step takes."""
    return {"latents": noise, "history": {name: np.zeros_like(noise) for name in HISTORY}}


def velocity_table(timestep: float) -> SolverTable:
    """One step with σ = 1 that returns the data prediction m0 = x − v: it shows the model's output v."""
    row = np.zeros(len(COLUMNS), np.float32)
    row[[COLUMNS.index("sigma"), COLUMNS.index("p_0")]] = 1
    return SolverTable("velocity", np.array([timestep], np.float32), row[None], np.zeros(2))


def _check_finite(latents: np.ndarray, when: str) -> None:
    """Raises WanError for NaN or infinity: checked early, and before anything is decoded from them."""
    wrong = latents.size - np.count_nonzero(np.isfinite(latents))
    if wrong:
        raise WanError(
            f"the latents are not finite {when}",
            expected="numbers",
            found=f"{wrong} NaN or infinite of {latents.size} values",
            remedy="check the weights with wanbuild verify, or build with --dtype float32",
        )
