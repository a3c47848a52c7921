"""The steps of a generation: its parameters, the rule that chooses a program for each step, and the calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wanrun.denoising.schedule import ExpertRange
from wanrun.denoising.solvers import COLUMNS, SolverTable
from wanrun.denoising.state import State
from wanrun.errors import UsageError
from wanrun.timing.timings import Timings

OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class StepContext:
    """What a rule knows when it chooses the program of a step.

    Attributes:
        index: index of the step, from 0.
        total: steps of all experts.
        expert: the transformer component whose step it is.
        first: index of this expert's first step.
        timestep: the step's timestep, 0 to 1000.
        sigma: the step's noise level.
        programs: names of the programs of this form of the loop, the full one first.
        state: latents (B, C, T, h, w) and all else that steps pass on, on the device; None in the scan form,
            whose programs are chosen before the first of an expert's steps has run.
    """

    index: int
    total: int
    expert: str
    first: int
    timestep: float
    sigma: float
    programs: tuple[str, ...]
    state: State | None


Rule = Callable[[StepContext], str]
"""Returns the name of the program that computes a step, one of the context's.

An expert's first step is always the full program's, and the rule is not asked: a cheaper program may reuse
what that step returns. State passes from one expert to the next.
"""


def in_turn(context: StepContext) -> str:
    """The rule that takes an expert's programs in turn, so that each of them runs."""
    return context.programs[(context.index - context.first) % len(context.programs)]


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Denoising:
    """One generation's parameters of the denoising loop, shared by all of its windows.

    Attributes:
        table: timesteps and coefficients.
        ranges: the steps of each expert.
        embeddings: (P, 512, text_dim), the positive prompt first.
        loop: the form of the loop, and the role of its programs: 'step' or 'scan'.
        timings: where steps are recorded.
        behind: called, more than once, when the next stage may start to load during the steps.
        on_step: called after each program call with the number of steps done and the total.
        rule: chooses the program of each step; None: the full program.
        window: index of the window that is made.
        windows: how many there are.
    """

    table: SolverTable
    ranges: Sequence[ExpertRange]
    embeddings: np.ndarray
    loop: str
    timings: Timings
    behind: Callable[[], None] = _nothing
    on_step: OnStep = _nothing
    rule: Rule | None = None
    window: int = 0
    windows: int = 1

    def reached(self, step: int) -> tuple[int, int]:
        """Returns how many steps of all windows are done after some of this window's, and how many are."""
        steps = len(self.table.timesteps)
        return self.window * steps + step, self.windows * steps

    def chosen(self, programs: tuple[str, ...], steps: ExpertRange, index: int, state: State | None) -> str:
        """Returns the program of a step.

        Args:
            programs: the programs of the form, the full one first.
            steps: the expert's steps.
            index: index of the step.
            state: the state before it.

        Raises:
            UsageError: if the rule names another program.
        """
        if self.rule is None or index == steps.first:
            return programs[0]
        total, sigma = (
            len(self.table.timesteps),
            float(self.table.coefficients[index, COLUMNS.index("sigma")]),
        )
        timestep = float(self.table.timesteps[index])
        name = self.rule(
            StepContext(index, total, steps.transformer, steps.first, timestep, sigma, programs, state)
        )
        if name not in programs:
            raise UsageError(
                f"the rule has chosen no program for step {index}",
                expected=" or ".join(programs),
                found=repr(name),
            )
        return name


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


def step_calls(table: SolverTable, steps: ExpertRange, choose: Callable[[int], str]) -> Iterator[Call]:
    """Yields one call per step, so that progress can be shown and Ctrl-C takes effect between steps.

    Args:
        table: timesteps and coefficients.
        steps: the range of steps.
        choose: names the program of a step, just before the step.
    """
    for index in range(steps.first, steps.last):
        row, timestep = table.coefficients[index], table.timesteps[index]
        arguments = {"coefficients": row, "timestep": timestep}
        yield Call(choose(index), arguments, index, index + 1, _noise_after(table, index))


def scan_calls(
    table: SolverTable, steps: ExpertRange, choose: Callable[[int], str], max_steps: int
) -> Iterator[Call]:
    """Yields one call per run of consecutive steps with the same program and no noise added between them.

    Args:
        table: timesteps and coefficients.
        steps: the range of steps.
        choose: names the program of a step; asked of all steps before the first.
        max_steps: rows in the programs' tables.
    """
    coefficients, timesteps = _padded(table.coefficients, max_steps), _padded(table.timesteps, max_steps)
    names = [choose(index) for index in range(steps.first, steps.last)]
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


def _padded(rows: np.ndarray, length: int) -> np.ndarray:
    """Returns the rows followed by zeros, which no step reads."""
    return np.concatenate([rows, np.zeros((length - len(rows), *rows.shape[1:]), rows.dtype)])


def velocity_table(timestep: float, steps: int = 1) -> SolverTable:
    """Returns a table whose steps have σ = 1 and give m0 = x − v, which reveals the model's output v."""
    row = np.zeros(len(COLUMNS), np.float32)
    row[[COLUMNS.index("sigma"), COLUMNS.index("p_0")]] = 1
    rows, zeros = np.tile(row, (steps, 1)), np.zeros(steps, np.float32)
    return SolverTable("velocity", np.full(steps, timestep, np.float32), rows, np.zeros(steps + 1), zeros)
