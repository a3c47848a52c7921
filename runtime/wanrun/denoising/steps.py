"""The steps of a generation: its parameters, and the calls of the loop's program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wanrun.artifact.roles import FORMS, Form, RoleName
from wanrun.denoising.schedule import ExpertRange
from wanrun.denoising.solvers import COLUMNS, SolverTable
from wanrun.denoising.state import State
from wanrun.timing.timings import Timings

OnState = Callable[[int, int, State], None]


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Denoising:
    """One generation's parameters of the denoising loop, shared by all of its windows.

    Attributes:
        table: timesteps and coefficients.
        ranges: the steps of each expert.
        embeddings: (P, 512, text_dim), the positive prompt first.
        loop: the form of the loop.
        timings: where steps are recorded.
        behind: called, more than once, when the next stage may start to load during the steps.
        on_step: called after each program call with the number of steps done, the total, and the state.
        window: index of the window that is made.
        windows: how many there are.
        maker: the role whose program makes all steps; None for those that the form of the loop has.
    """

    table: SolverTable
    ranges: Sequence[ExpertRange]
    embeddings: np.ndarray
    loop: str
    timings: Timings
    behind: Callable[[], None] = _nothing
    on_step: OnState = _nothing
    window: int = 0
    windows: int = 1
    maker: RoleName | None = None

    @property
    def form(self) -> Form:
        """The form of the loop."""
        return FORMS[self.loop]

    def maker_of(self, step: int) -> RoleName:
        """Returns the role whose program makes a step."""
        return self.maker or self.form.maker(step)

    def reached(self, step: int) -> tuple[int, int]:
        """Returns how many steps of all windows are done after some of this window's, and how many are."""
        steps = len(self.table.timesteps)
        return self.window * steps + step, self.windows * steps


@dataclass(frozen=True)
class Call:
    """One call of the loop's program.

    Attributes:
        arguments: the steps it takes, as the program's inputs.
        first: index of its first step.
        last: one past its last step.
        noise: weight of the noise added to the latents after the call; None for a solver that adds none.
            After the last step it is 0, and the noise is still drawn, as in the reference.
    """

    arguments: Mapping[str, Any]
    first: int
    last: int
    noise: float | None = None


def step_calls(table: SolverTable, steps: ExpertRange) -> Iterator[Call]:
    """Yields one call per step, so that progress can be shown and Ctrl-C takes effect between steps."""
    for index in range(steps.first, steps.last):
        row, timestep = table.coefficients[index], table.timesteps[index]
        arguments = {"coefficients": row, "timestep": timestep}
        yield Call(arguments, index, index + 1, _noise_after(table, index))


def scan_calls(table: SolverTable, steps: ExpertRange, max_steps: int) -> Iterator[Call]:
    """Yields one call for all steps, or one per step of a solver that adds noise after each.

    Args:
        table: timesteps and coefficients.
        steps: the range of steps.
        max_steps: rows in the program's tables.
    """
    rows = {
        "coefficients": _padded(table.coefficients, max_steps),
        "timesteps": _padded(table.timesteps, max_steps),
    }
    length = 1 if table.noise.any() else steps.last - steps.first
    for first in range(steps.first, steps.last, length):
        last = first + length
        arguments = {**rows, "first": np.int32(first), "last": np.int32(last)}
        yield Call(arguments, first, last, _noise_after(table, last - 1))


def _noise_after(table: SolverTable, index: int) -> float | None:
    """Returns the weight of the noise after a step; None if the table's solver adds none."""
    return float(table.noise[index]) if table.noise.any() else None


def _padded(rows: np.ndarray, length: int) -> np.ndarray:
    """Returns the rows followed by zeros, which no step reads."""
    return np.concatenate([rows, np.zeros((length - len(rows), *rows.shape[1:]), rows.dtype)])


def velocity_table(timestep: float) -> SolverTable:
    """Returns a table of one step with σ = 1 that gives m0 = x − v, which reveals the model's output v."""
    row = np.zeros((1, len(COLUMNS)), np.float32)
    row[0, [COLUMNS.index("sigma"), COLUMNS.index("p_0")]] = 1
    return SolverTable(
        "velocity", np.array([timestep], np.float32), row, np.zeros(2), np.zeros(1, np.float32)
    )
