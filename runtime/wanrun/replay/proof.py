"""Proves programs with inputs of which each decides the result, above all those that make steps.

A solver's table has zeros, and a short run never reads its history. So a step is made of random latents, a
random history and random coefficients. The update is linear in the model's predictions, and the history that
is returned holds these: NumPy has the rest. The first prediction is that of the velocity, which a table
reveals that needs no history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from wanrun.artifact.roles import FORMS, ROLES, RoleName
from wanrun.denoising.noise import Noise
from wanrun.denoising.solvers import COLUMNS, HISTORY, SolverTable
from wanrun.denoising.state import State, start_state
from wanrun.denoising.steps import Denoising, ExpertRange
from wanrun.errors import VerificationError
from wanrun.executables.tolerance import TOLERANCES, VELOCITY_TOLERANCES, relative_error
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.sampler import Sampler
from wanrun.machine.jax_process import own_options
from wanrun.replay.guided import prove_guiders
from wanrun.replay.velocity import SCALE, TIMESTEP, Start, velocity
from wanrun.timing.timings import Timings

TIMESTEPS = (300.0, TIMESTEP, 700.0)
"""Of the rows of the table. The first row is left out, as a program must do."""

SCALES = (SCALE, 1.0, 2.0)
"""Of guidance, in which velocities are linear: those of the first two give that of the third, the steps'."""

FLOAT32_ROUNDING = 2.0**-24


class Bounded(NamedTuple):
    """Values, float64, and how far those of a right program may lie from each."""

    values: np.ndarray
    bound: np.ndarray

    @classmethod
    def stored(cls, values: np.ndarray, rounding: float) -> Bounded:
        """Returns values that were rounded when they were stored."""
        return cls(values, rounding * np.abs(values))

    def rounded(self, rounding: float) -> Bounded:
        """Returns the values after they are stored."""
        return Bounded(self.values, self.bound + rounding * np.abs(self.values))


def _combined(*terms: tuple[float, Bounded]) -> Bounded:
    """Returns a sum of multiples in float32: each of its products and sums is rounded once."""
    sizes = sum(abs(factor) * np.abs(one.values) for factor, one in terms)
    bound = sum(abs(factor) * one.bound for factor, one in terms)
    values = sum(factor * one.values for factor, one in terms)
    return Bounded(np.asarray(values), np.asarray(bound + len(terms) * FLOAT32_ROUNDING * sizes))


def updated(
    rows: np.ndarray, state: Mapping[str, np.ndarray], predictions: Sequence[np.ndarray], rounding: float
) -> dict[str, Bounded]:
    """Returns the state after steps, by the recurrence of ``wanrun.denoising.solvers``.

    Args:
        rows: (N, 9), a row of coefficients for each step.
        state: ``latents`` and ``HISTORY`` before the steps, float64.
        predictions: of the clean sample, m0 of each step, as the program has stored them.
        rounding: the unit roundoff of the dtype that states are stored in.
    """
    x, last, m1, m2 = (Bounded(state[name], np.zeros(())) for name in ("latents", *HISTORY))
    for row, prediction in zip(rows.astype(np.float64), predictions, strict=True):
        c, m0 = dict(zip(COLUMNS, row.tolist(), strict=True)), Bounded.stored(prediction, rounding)
        last = _combined((c["c_x"], x), (c["c_last"], last), (c["c_0"], m0), (c["c_1"], m1), (c["c_2"], m2))
        x = _combined((c["p_x"], last), (c["p_0"], m0), (c["p_1"], m1)).rounded(rounding)
        last, m1, m2 = last.rounded(rounding), m0, m1
    return dict(zip(("latents", *HISTORY), (x, last, m1, m2), strict=True))


@dataclass(frozen=True)
class _Steps:
    """Steps of one program that makes steps, from a random state by a random table.

    Attributes:
        name: the program's name.
        run: the steps of one expert.
        given: the state before them.
    """

    name: str
    run: Denoising
    given: State

    @classmethod
    def drawn(cls, sampler: Sampler, start: Start, form: str, maker: RoleName, expert: str) -> _Steps:
        """Returns one step; of a program that makes several in a call, two in one call.

        Raises:
            VerificationError: if the program passes on something that is no solver's history.
        """
        (name,), looped = sampler.programs.with_role(maker), FORMS[form].looped
        rows = min(len(TIMESTEPS), sampler.profile.options.max_steps) if looped else len(TIMESTEPS)
        first = min(1, rows - 1)
        steps = ExpertRange.alike(expert, first, rows if looped else first + 1, SCALES[-1])
        generator = np.random.default_rng(0)
        signs = generator.choice([-1.0, 1.0], (rows, len(COLUMNS)))
        signs[:, COLUMNS.index("sigma")] = 1
        table = SolverTable(
            "random",
            np.array((TIMESTEPS if rows > 1 else (TIMESTEP,))[:rows], np.float32),
            (signs * generator.uniform(0.25, 1, signs.shape)).astype(np.float32),
            np.zeros(rows + 1),
            np.zeros(rows, np.float32),
        )
        given = start_state(start.noise, sampler.programs[name])
        history = given.get("history")
        if given.keys() != {"latents", "history"} or set(history or ()) != set(HISTORY):
            raise VerificationError(
                f"{name} passes on what nothing proves",
                expected=f"latents, and a history of {', '.join(HISTORY)}",
                found=", ".join(map(str, given)),
            )
        draw = {key: generator.standard_normal(start.noise.shape, np.float32) for key in HISTORY}
        drawn = {key: values.astype(given["latents"].dtype) for key, values in draw.items()}
        run = Denoising(table, [steps], start.embeddings, form, Timings(), maker=maker)
        return cls(name, run, {**given, "history": drawn})

    @property
    def rows(self) -> np.ndarray:
        """The coefficients of the steps."""
        (steps,) = self.run.ranges
        return self.run.table.coefficients[steps.first : steps.last]

    def check(self, found: State, half: np.ndarray, one: np.ndarray, most: float) -> None:
        """Compares the state after the steps with NumPy's.

        Args:
            found: the state.
            half: the program's velocity for these latents with the first of ``SCALES``, float32.
            one: with the second; the same array for a program without guidance.
            most: the relative error of velocities that is allowed.

        Raises:
            VerificationError: naming the first array that differs.
        """
        rounding = float(ml_dtypes.finfo(self.given["latents"].dtype).eps) / 2
        before, after = _flat(self.given), _flat(found)
        predictions = [after["m1"]] if len(self.rows) == 1 else [after["m2"], after["m1"]]
        x, m0, sigma = before["latents"], predictions[0], float(self.rows[0, 0])
        # Latents, and the result of the velocity's step, were rounded when they were stored.
        seen = [Bounded(v.astype(np.float64), rounding * (np.abs(x) + np.abs(x - v))) for v in (half, one)]
        beyond = (SCALES[2] - SCALES[1]) / (SCALES[1] - SCALES[0])
        moved = _combined((-beyond, seen[0]), (1 + beyond, seen[1]))
        bound = moved.bound + rounding * (np.abs(x) + np.abs(m0) / sigma)
        self.compare("prediction", moved.values, (x - m0) / sigma, most + _share(bound, moved.values))
        for key, expected in updated(self.rows, before, predictions, rounding).items():
            self.compare(key, expected.values, after[key], _share(expected.bound, expected.values))

    def compare(self, what: str, expected: np.ndarray, found: np.ndarray, most: float) -> None:
        """Raises VerificationError if an array differs by more than this relative error."""
        if not (error := relative_error(found, expected)) <= most:
            raise VerificationError(
                f"{self.name} makes other steps than the solver's table says: wrong {what}",
                expected=f"at most {most:.1e} relative",
                found=f"{error:.1e}",
                remedy="build the artifact again",
            )


def _share(bound: np.ndarray, values: np.ndarray) -> float:
    """Returns a bound's norm, relative to that of the values."""
    return float(np.linalg.norm(np.broadcast_to(bound, values.shape)) / np.linalg.norm(values))


def _flat(state: State) -> dict[str, np.ndarray]:
    """Returns latents and history on the host, float64."""
    arrays: dict[str, Any] = {"latents": state["latents"], **state["history"]}
    return {name: np.asarray(one).astype(np.float64) for name, one in arrays.items()}


@own_options()
def prove_steps(
    sampler: Sampler,
    start: Start,
    form: str,
    whole: np.ndarray,
    own: np.ndarray | None = None,
    factor: float = 1.0,
) -> None:
    """Proves the programs of a form of the loop that make steps, with every expert.

    Args:
        sampler: the profile's.
        start: what velocities are computed from.
        form: the form of the loop.
        whole: the velocities of a full step, of this form or another.
        own: those of this form's full step, where they are known.
        factor: multiplies the tolerances of velocities.

    Raises:
        VerificationError: naming the program that is wrong.
    """
    first, *_ = makers = FORMS[form].makers
    own = velocity(sampler, start, form) if own is None else own
    most = factor * VELOCITY_TOLERANCES[sampler.profile.options.dtype]
    for maker in makers:
        (name,), scale = sampler.programs.with_role(maker), ROLES[maker].proven.guidance_scale
        guided = sampler.profile.guidance
        expected = whole if scale is None else velocity(sampler, start, form, first, scale)
        half = own if maker == first else velocity(sampler, start, form, maker)
        one = velocity(sampler, start, form, maker, SCALES[1]) if guided else half
        for number, expert in enumerate(start.experts):
            steps = _Steps.drawn(sampler, start, form, maker, expert)
            steps.compare("velocity", expected[number], half[number], most)
            if guided and np.array_equal(one[number], half[number]):
                raise VerificationError(f"guidance_scale changes nothing of what {name} returns")
            conditions = start.conditions_of(sampler, steps.run)
            found = sampler.steps(steps.run, steps.given, conditions, Noise(0))
            steps.check(found, half[number], one[number], most)
        if guided:
            prove_guiders(sampler, start, form, maker, half, one, most)


def prove_encoders(pipeline: Pipeline, prompts: Iterable[str]) -> None:
    """Compares the text encoder's programs by short prompts with the shortest one, which makes the video.

    Raises:
        VerificationError: if one differs.
    """
    for prompt in prompts:
        first: np.ndarray | None = None
        for length, rows in pipeline.encoded_at_lengths(prompt).items():
            values = rows.astype(np.float64)
            first = values if first is None else first
            error, most = relative_error(values, first), TOLERANCES[pipeline.profile.options.dtype]
            if not error <= most:
                raise VerificationError(
                    f"the text encoder of {length} tokens differs from the shortest one",
                    expected=f"at most {most:g} relative",
                    found=f"{error:.2e}",
                )
    pipeline.session(pipeline.profile).text.spare()


def check_all_ran(pipeline: Pipeline) -> None:
    """Checks that every program of the loaded profile has run, but for those that bring weights to a mesh.

    Raises:
        VerificationError: naming one that has not, whose role no part of a proof knows.
    """
    programs = pipeline.session(pipeline.profile).programs
    for name in programs.weights.executables.idle(pipeline.profile):
        role = programs[name].role
        if ROLES[role].proven.by != "weights":
            raise VerificationError(
                f"{name} has not run, so nothing proves it",
                expected=f"its role, {role}, in what a generation runs",
                remedy="build the artifact again",
            )
