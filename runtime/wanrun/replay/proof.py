"""Proves programs with inputs of which each decides the result, above all those that make steps.

A solver's table has zeros, and a short run never reads its history. So a step is made of random latents, a
random history and random coefficients. The update is linear in the model's predictions, and the history that
is returned holds these: NumPy has the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from wanrun.artifact.roles import FORMS, ROLES, RoleName
from wanrun.denoising.solvers import COLUMNS, HISTORY
from wanrun.denoising.state import State
from wanrun.errors import VerificationError
from wanrun.executables.tolerance import CALL_TOLERANCES, TOLERANCES, relative_error
from wanrun.generation.chunks import REMEMBER
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.sampler import Sampler
from wanrun.machine.jax_process import own_options
from wanrun.replay.guided import HALF, prove_guiders
from wanrun.replay.random_steps import SCALE, DrawnSteps, LoopStart, flat

SCALES = (HALF, 1.0, SCALE)
"""Of guidance, in which velocities are linear: those of the first two give that of the third."""

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
    """Returns the state after N steps, by the recurrence of ``wanrun.denoising.solvers``.

    ``rows`` are the steps' coefficients, (N, 9); ``state`` has ``latents`` and ``HISTORY`` before the steps,
    float64. ``predictions`` are each step's m0, of the clean sample, as the program has stored them;
    ``rounding`` is the unit roundoff of the dtype that states are stored in.
    """
    x, last, m1, m2 = (Bounded(state[name], np.zeros(())) for name in ("latents", *HISTORY))
    for row, prediction in zip(rows.astype(np.float64), predictions, strict=True):
        c, m0 = dict(zip(COLUMNS, row.tolist(), strict=True)), Bounded.stored(prediction, rounding)
        last = _combined((c["c_x"], x), (c["c_last"], last), (c["c_0"], m0), (c["c_1"], m1), (c["c_2"], m2))
        x = _combined((c["p_x"], last), (c["p_0"], m0), (c["p_1"], m1)).rounded(rounding)
        last, m1, m2 = last.rounded(rounding), m0, m1
    return dict(zip(("latents", *HISTORY), (x, last, m1, m2), strict=True))


def _share(bound: np.ndarray, values: np.ndarray) -> float:
    """Returns a bound's norm, relative to that of the values."""
    return float(np.linalg.norm(np.broadcast_to(bound, values.shape)) / np.linalg.norm(values))


def _check_update(steps: DrawnSteps, found: State) -> None:
    """Compares the state after steps with NumPy's, and names the first array that differs."""
    rounding, after = _rounding(steps), flat(found)
    made = updated(steps.rows, flat(steps.given), steps.predictions(found), rounding)
    for key, expected in made.items():
        _compare(steps.name, key, expected.values, after[key], _share(expected.bound, expected.values))


def _rounding(steps: DrawnSteps) -> float:
    """Returns the unit roundoff of the dtype that states are stored in."""
    return float(ml_dtypes.finfo(steps.given["latents"].dtype).eps) / 2


def _stored_velocity(steps: DrawnSteps, found: State) -> Bounded:
    """Returns a first step's velocity, which the clean sample shows that was rounded when it was stored."""
    x, m0, sigma = flat(steps.given)["latents"], steps.predictions(found)[0], float(steps.rows[0, 0])
    return Bounded(steps.velocity(found), _rounding(steps) * (np.abs(x) + np.abs(m0)) / abs(sigma))


def _compare(name: str, what: str, expected: np.ndarray, found: np.ndarray, most: float) -> None:
    """Raises VerificationError if an array differs by more than this relative error."""
    if not (error := relative_error(found, expected)) <= most:
        raise VerificationError(
            "other_results",
            f"{name} makes other steps than the solver's table says: wrong {what}",
            expected=f"at most {most:.1e} relative",
            found=f"{error:.1e}",
            remedy="build the artifact again",
        )


@own_options()
def prove_steps(sampler: Sampler, start: LoopStart, form: str, whole: np.ndarray | None = None) -> np.ndarray:
    """Proves the programs of a form of the loop that make steps, with every expert.

    ``whole`` are the velocities that another form's full step has for the same state, float64 (experts, B, C,
    T, h, w); None where this form is the first. Returns those that the next form is compared with: ``whole``,
    or this form's. Raises VerificationError, naming the program that is wrong.
    """
    most = CALL_TOLERANCES[sampler.profile.options.dtype]
    for maker, name in _makers(sampler, form):
        moved = {
            scale: [_proven(sampler, start, form, maker, name, expert, scale) for expert in start.experts]
            for scale in (SCALES if sampler.profile.guidance else SCALES[-1:])
        }
        if FORMS[form].chunked:  # programs of other sizes have other velocities
            _prove_past(sampler, start, form, maker, name)
            whole = None
        values = {scale: np.stack([one.values for one in each]) for scale, each in moved.items()}
        whole = values[SCALES[-1]] if whole is None else whole
        bound = np.stack([one.bound for one in moved[SCALES[-1]]])
        _compare(name, "velocity", whole, values[SCALES[-1]], most + 2 * _share(bound, whole))
        if sampler.profile.guidance:
            _prove_guidance(name, moved, most)
            half, one = (values[scale] for scale in SCALES[:2])
            prove_guiders(sampler, start, form, maker, name, half, one, most)
    assert whole is not None
    return whole


def _makers(sampler: Sampler, form: str) -> list[tuple[RoleName, str]]:
    """Returns the programs of a form that make steps, each with its role."""
    return [(role, name) for role in FORMS[form].makers for name in sampler.programs.with_role(role)]


def _prove_past(sampler: Sampler, start: LoopStart, form: str, maker: RoleName, name: str) -> None:
    """Proves that what is kept of earlier chunks decides what a chunk becomes, and what is kept after it."""
    for expert in start.experts:
        steps = DrawnSteps.drawn(sampler, start, form, maker, expert, name=name)
        other = steps.after(sampler, seed=1)
        latents = replace(steps, given={**steps.given, "latents": -steps.given["latents"]})
        _decides("cache", name, *(one.made(sampler, start) for one in (steps, other)))
        kept, *others = (one.remembered(sampler, start) for one in (steps, other, latents))
        for what, found in zip(("cache", "latents"), others, strict=True):
            _decides(what, REMEMBER, kept, found)


def _decides(what: str, name: str, one: Any, other: Any) -> None:
    """Raises VerificationError if a program returns the same for two values of an input."""
    import jax

    if all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other))):
        raise VerificationError("other_results", f"{what} changes nothing of what {name} returns")


def _proven(
    sampler: Sampler, start: LoopStart, form: str, maker: RoleName, name: str, expert: str, scale: float
) -> Bounded:
    """Makes drawn steps, proves their update, and returns the first one's velocity."""
    steps = DrawnSteps.drawn(sampler, start, form, maker, expert, scale, name=name)
    found = steps.made(sampler, start)
    _check_update(steps, found)
    return _stored_velocity(steps, found)


def _prove_guidance(name: str, moved: Mapping[float, Sequence[Bounded]], most: float) -> None:
    """Proves that velocities are linear in the scale of guidance, and depend on it."""
    beyond = (SCALES[2] - SCALES[1]) / (SCALES[1] - SCALES[0])
    for half, one, found in zip(*(moved[scale] for scale in SCALES), strict=True):
        if np.array_equal(half.values, one.values):
            raise VerificationError("other_results", f"guidance_scale changes nothing of what {name} returns")
        expected = _combined((-beyond, half), (1 + beyond, one))
        bound = expected.bound + found.bound
        _compare(name, "prediction", expected.values, found.values, most + _share(bound, expected.values))


def prove_encoders(pipeline: Pipeline, prompts: Iterable[str]) -> None:
    """Compares the text encoder's programs by short prompts with the shortest one, which makes the video.

    Raises VerificationError if one differs.
    """
    for prompt in prompts:
        first: np.ndarray | None = None
        for length, rows in pipeline.encoded_at_lengths(prompt).items():
            values = rows.astype(np.float64)
            first = values if first is None else first
            error, most = relative_error(values, first), TOLERANCES[pipeline.profile.options.dtype]
            if not error <= most:
                raise VerificationError(
                    "other_results",
                    f"the text encoder of {length} tokens differs from the shortest one",
                    expected=f"at most {most:g} relative",
                    found=f"{error:.2e}",
                )
    pipeline.session(pipeline.profile).text.spare()


def check_all_ran(pipeline: Pipeline, forms: Collection[str] | None = None) -> None:
    """Checks that every program of the loaded profile has run, but for those that bring weights to a mesh.

    Those of a text encoder that runs on the CPU need not, nor those of other ``forms`` of the loop; None for
    all forms. Raises VerificationError, naming one that has not, whose role no part of a proof knows.
    """
    session = pipeline.session(pipeline.profile)
    programs = session.programs
    needed = {role for form in FORMS.values() if forms is None or form.name in forms for role in form.roles}
    others = {role for form in FORMS.values() for role in form.roles} - needed
    if session.text.opened is not programs.weights.opened:
        others |= {"text"}
    for name in programs.weights.executables.idle(pipeline.profile):
        role = programs[name].role
        if role not in others and ROLES[role].proven != "weights":
            raise VerificationError(
                "other_results",
                f"{name} has not run, so nothing proves it",
                expected=f"its role, {role}, in what a generation runs",
                remedy="build the artifact again",
            )
