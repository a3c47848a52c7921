"""Steps in which every input decides the result: random latents, a random history, random coefficients.

A solver's table has zeros, and a short run never reads its history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wanrun.artifact.roles import FORMS, RoleName
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.noise import Noise
from wanrun.denoising.solvers import COLUMNS, HISTORY, SolverTable
from wanrun.denoising.state import State, start_state, zeros
from wanrun.denoising.steps import Denoising, ExpertRange, transformers
from wanrun.errors import VerificationError
from wanrun.generation.chunks import REMEMBER
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.sampler import Sampler
from wanrun.machine.jax_process import own_options
from wanrun.media.inputs import Inputs
from wanrun.request.generation import Generation
from wanrun.timing.timings import Timings
from wanrun.weights.buffers import DTYPES

TIMESTEPS = (300.0, 900.0, 700.0)
"""Of the rows of the table. The first row is left out, as a program must do."""

SCALE = 2.0
"""Of guidance."""

CHUNK = 3
"""The number of a drawn chunk: some of what is kept of earlier ones is there, and not all."""

PERIOD = 2**17 - 1
"""Values that are drawn for an array; a larger one repeats them. It is prime, and more than a video's tokens:
so no two tokens have the same values."""


@dataclass(frozen=True)
class LoopStart:
    """The inputs that random steps begin with.

    ``embeddings`` are (P, L, text_dim), ``noise`` the latents, float32 (B, C, T, h, w). ``conditions`` are
    inputs from images and videos, of which no frame is held.
    """

    experts: tuple[str, ...]
    embeddings: np.ndarray
    conditions: Conditions
    noise: np.ndarray

    @classmethod
    @own_options()
    def of(cls, pipeline: Pipeline, generation: Generation, inputs: Inputs | None) -> LoopStart:
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
    """One step of the program ``name``, or two in one call of a program that makes several in a call.

    ``run`` are the steps, of one expert, ``given`` the state before them. For the steps of a chunk, ``past``
    is what is kept of earlier ones and its number; empty for others.
    """

    name: str
    run: Denoising
    given: State
    past: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def drawn(
        cls,
        sampler: Sampler,
        start: LoopStart,
        form: str,
        maker: RoleName,
        expert: str,
        scale: float = SCALE,
        *,
        name: str | None = None,
        skip_scale: float = 0.0,
        **guidance: Any,
    ) -> DrawnSteps:
        """Returns steps, the same ones for the same inputs.

        The program that makes them is the only one of the role ``maker``, or ``name``. ``scale`` is that of
        guidance in each step, ``skip_scale`` that of a pass that skips layers, 0 for no such pass;
        ``guidance`` are further attributes of ``ExpertRange``. Raises VerificationError if the program passes
        on something other than a solver's history.
        """
        (name,) = (name,) if name is not None else sampler.programs.with_role(maker)
        looped, noise = FORMS[form].looped, start.noise
        if FORMS[form].chunked:
            noise = np.resize(noise, sampler.programs[name].array("latents")[1])
        rows = min(len(TIMESTEPS), sampler.profile.options.max_steps) if looped else len(TIMESTEPS)
        first = min(1, rows - 1)
        last = rows if looped else first + 1
        skips = (skip_scale,) * (last - first) if skip_scale else ()
        steps = ExpertRange.alike(expert, first, last, scale, skip_scales=skips, **guidance)
        generator = np.random.default_rng(0)
        given = start_state(noise, sampler.programs[name])
        history = given.get("history")
        if given.keys() != {"latents", "history"} or set(history or ()) != set(HISTORY):
            raise VerificationError(
                "other_results",
                f"{name} passes on what nothing proves",
                expected=f"latents, and a history of {', '.join(HISTORY)}",
                found=", ".join(map(str, given)),
            )
        table = _table(generator, rows)
        draw = {key: generator.standard_normal(noise.shape, np.float32) for key in HISTORY}
        drawn = {key: values.astype(given["latents"].dtype) for key, values in draw.items()}
        run = Denoising(table, [steps], start.embeddings, form, Timings(), maker=maker)
        made = cls(name, run, {**given, "history": drawn})
        return made.after(sampler) if FORMS[form].chunked else made

    def after(self, sampler: Sampler, seed: int = 0) -> DrawnSteps:
        """Returns the same steps of a chunk after others, whose cache is drawn by a seed."""
        import jax

        (keeper,) = sampler.programs.with_role(REMEMBER)
        record = sampler.programs[keeper]
        avals, tree = jax.tree.flatten({name: record.avals["inputs"][name] for name in record.donated})
        # Arrays differ in their values: two that are exchanged show.
        kept = [drawn(one, index + seed * len(avals)) for index, one in enumerate(avals)]
        return replace(self, past={**jax.tree.unflatten(tree, kept), "chunk": np.int32(CHUNK)})

    def remembered(self, sampler: Sampler, start: LoopStart) -> Any:
        """Returns the cache after a chunk that has the state's latents. Raises as ``Sampler.steps``."""
        (steps,), (keeper,) = self.run.ranges, sampler.programs.with_role(REMEMBER)
        program = sampler.programs.of_expert(keeper, steps.transformer, self.run.loras)
        constant = sampler.prepare(self.run, start.conditions, steps)
        shape = sampler.programs[keeper].array("latents")[1]
        latents = np.resize(np.asarray(self.given["latents"], np.float32), shape)
        return program(**constant, **self.past, latents=latents)

    @property
    def rows(self) -> np.ndarray:
        """The coefficients of the steps, float32 (steps, 9)."""
        (steps,) = self.run.ranges
        return self.run.table.coefficients[steps.first : steps.last]

    def made(self, sampler: Sampler, start: LoopStart) -> State:
        """Makes the steps, and returns the state after them. Raises as ``Sampler.steps``."""
        return sampler.steps(self.run, self.given, start.conditions, Noise(0), self.past)

    def predictions(self, found: State) -> list[np.ndarray]:
        """Returns each step's prediction of the clean sample, float64, from the state after them."""
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


def drawn(avals: Any, number: int) -> Any:
    """Returns random values, using all bytes; scalars are ``number``, which may turn a part of a program on.

    ``avals`` are those of ``wanrun.denoising.state.zeros``.
    """
    if isinstance(avals, Mapping):
        return {name: drawn(one, number) for name, one in avals.items()}
    zero, random = zeros(avals), np.random.default_rng(number)
    if not zero.ndim:
        return np.full_like(zero, number)
    if zero.dtype == np.uint8:
        return np.resize(random.integers(0, 256, PERIOD, dtype=np.uint8), zero.shape)
    values = random.standard_normal(PERIOD)
    if zero.dtype == np.uint16:  # bits of bfloat16
        return np.resize(values.astype(DTYPES["bfloat16"]), zero.shape).view(zero.dtype)
    return np.resize(values, zero.shape).astype(zero.dtype)


def flat(state: State) -> Mapping[str, np.ndarray]:
    """Returns latents and history on the host, float64."""
    arrays: dict[str, Any] = {"latents": state["latents"], **state["history"]}
    return {name: np.asarray(one).astype(np.float64) for name, one in arrays.items()}


@own_options()
def velocities(
    sampler: Sampler, start: LoopStart, form: str, maker: RoleName, scale: float, **guidance: Any
) -> np.ndarray:
    """Returns the velocities of all experts in drawn steps, float64 (experts, B, C, T, h, w).

    Arguments, and errors, are those of ``DrawnSteps.drawn`` and ``made``.
    """
    found = []
    for expert in start.experts:
        steps = DrawnSteps.drawn(sampler, start, form, maker, expert, scale, **guidance)
        found.append(steps.velocity(steps.made(sampler, start)))
    return np.stack(found)
