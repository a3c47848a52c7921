"""Steps in which every input decides the result: random latents, a random history, random coefficients.

A solver's table has zeros, and a short run never reads its history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wanrun.artifact.roles import FORMS, RoleName
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.noise import Noise
from wanrun.denoising.solvers import COLUMNS, HISTORY, SolverTable
from wanrun.denoising.state import State, start_state
from wanrun.denoising.steps import Denoising, ExpertRange, transformers
from wanrun.errors import VerificationError
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.sampler import Sampler
from wanrun.machine.jax_process import own_options
from wanrun.media.types import Inputs
from wanrun.request.generation import Generation
from wanrun.timing.timings import Timings

TIMESTEPS = (300.0, 900.0, 700.0)
"""Of the rows of the table. The first row is left out, as a program must do."""

SCALE = 2.0
"""Of guidance."""


@dataclass(frozen=True)
class Start:
    """What steps are made from.

    Attributes:
        experts: the transformers.
        embeddings: of the prompts, (P, L, text_dim).
        conditions: inputs from images and videos, of which no frame is held.
        noise: the latents, float32 (B, C, T, h, w).
    """

    experts: tuple[str, ...]
    embeddings: np.ndarray
    conditions: Conditions
    noise: np.ndarray

    @classmethod
    @own_options()
    def of(cls, pipeline: Pipeline, generation: Generation, inputs: Inputs | None) -> Start:
        """Returns that of a generation: its prompts, images, videos and seed."""
        session = pipeline.session(generation.profile)
        conditions = session.conditioning(inputs, timings=Timings(), options=generation.options)
        return cls(
            transformers(pipeline.manifest),
            pipeline.encode_prompts(generation.prompts),
            replace(conditions, start=None, held=None),
            Noise(generation.options["seed"])(session.latents_shape),
        )


@dataclass(frozen=True)
class DrawnSteps:
    """One step of a program, or two in one call of a program that makes several in a call.

    Attributes:
        name: the program's name.
        run: the steps, of one expert.
        given: the state before them.
    """

    name: str
    run: Denoising
    given: State

    @classmethod
    def drawn(
        cls,
        sampler: Sampler,
        start: Start,
        form: str,
        maker: RoleName,
        expert: str,
        scale: float = SCALE,
        *,
        skip_scale: float = 0.0,
        **guidance: Any,
    ) -> DrawnSteps:
        """Returns steps, the same ones for the same inputs.

        Args:
            sampler: the profile's.
            start: what they are made from.
            form: the form of the loop.
            maker: the role of the program that makes them.
            expert: the transformer.
            scale: of guidance, in each step.
            skip_scale: of a pass that skips layers, in each step; 0 for no such pass.
            guidance: further attributes of ``ExpertRange``.

        Raises:
            VerificationError: if the program passes on something that is no solver's history.
        """
        (name,), looped = sampler.programs.with_role(maker), FORMS[form].looped
        rows = min(len(TIMESTEPS), sampler.profile.options.max_steps) if looped else len(TIMESTEPS)
        first = min(1, rows - 1)
        last = rows if looped else first + 1
        skips = (skip_scale,) * (last - first) if skip_scale else ()
        steps = ExpertRange.alike(expert, first, last, scale, skip_scales=skips, **guidance)
        generator = np.random.default_rng(0)
        given = start_state(start.noise, sampler.programs[name])
        history = given.get("history")
        if given.keys() != {"latents", "history"} or set(history or ()) != set(HISTORY):
            raise VerificationError(
                f"{name} passes on what nothing proves",
                expected=f"latents, and a history of {', '.join(HISTORY)}",
                found=", ".join(map(str, given)),
            )
        table = _table(generator, rows)
        draw = {key: generator.standard_normal(start.noise.shape, np.float32) for key in HISTORY}
        drawn = {key: values.astype(given["latents"].dtype) for key, values in draw.items()}
        run = Denoising(table, [steps], start.embeddings, form, Timings(), maker=maker)
        return cls(name, run, {**given, "history": drawn})

    @property
    def rows(self) -> np.ndarray:
        """The coefficients of the steps, float32 (steps, 9)."""
        (steps,) = self.run.ranges
        return self.run.table.coefficients[steps.first : steps.last]

    def made(self, sampler: Sampler, start: Start) -> State:
        """Makes the steps, and returns the state after them. Raises as ``Sampler.steps``."""
        return sampler.steps(self.run, self.given, start.conditions, Noise(0))

    def predictions(self, found: State) -> list[np.ndarray]:
        """Returns what each step predicts of the clean sample, float64, from the state after them."""
        after = flat(found)
        return [after["m1"]] if len(self.rows) == 1 else [after["m2"], after["m1"]]

    def velocity(self, found: State) -> np.ndarray:
        """Returns the velocity of the first step, float64, from the state after all of them."""
        return (flat(self.given)["latents"] - self.predictions(found)[0]) / float(self.rows[0, 0])


def _table(generator: np.random.Generator, rows: int) -> SolverTable:
    """Returns a solver's table of random coefficients, of which none is small."""
    signs = generator.choice([-1.0, 1.0], (rows, len(COLUMNS)))
    # Predictions are mostly velocity, which the latents do not cancel: its rounding is not enlarged.
    signs[:, COLUMNS.index("sigma")] = -4
    return SolverTable(
        "random",
        np.array((TIMESTEPS if rows > 1 else TIMESTEPS[1:])[:rows], np.float32),
        (signs * generator.uniform(0.25, 1, signs.shape)).astype(np.float32),
        np.zeros(rows + 1),
        np.zeros(rows, np.float32),
    )


def flat(state: State) -> Mapping[str, np.ndarray]:
    """Returns latents and history on the host, float64."""
    arrays: dict[str, Any] = {"latents": state["latents"], **state["history"]}
    return {name: np.asarray(one).astype(np.float64) for name, one in arrays.items()}


@own_options()
def velocities(
    sampler: Sampler, start: Start, form: str, maker: RoleName, scale: float, **guidance: Any
) -> np.ndarray:
    """Returns the velocities of all experts in drawn steps, float64 (experts, B, C, T, h, w).

    Arguments, and errors, are those of ``DrawnSteps.drawn`` and ``made``.
    """
    found = []
    for expert in start.experts:
        steps = DrawnSteps.drawn(sampler, start, form, maker, expert, scale, **guidance)
        found.append(steps.velocity(steps.made(sampler, start)))
    return np.stack(found)
