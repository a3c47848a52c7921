"""The velocity that a profile's transformers predict for fixed noise: it tells wrong executables from right.

Latents tell less: a few steps from noise to a video and a guidance of 5 multiply rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wanrun.artifact.roles import FORMS, RoleName
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.noise import Noise
from wanrun.denoising.steps import Denoising, ExpertRange, transformers, velocity_table
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.sampler import Sampler
from wanrun.generation.streamed import StreamedStep
from wanrun.machine.jax_process import own_options
from wanrun.media.types import Inputs
from wanrun.request.generation import Generation
from wanrun.timing.timings import Timings

TIMESTEP = 900.0
SCALE = 0.5
"""Of guidance: the mean of both halves, so that each counts as much as the other, and no error grows."""


@dataclass(frozen=True)
class Start:
    """What velocities are computed from.

    Attributes:
        experts: the transformers.
        embeddings: of the prompts, (P, L, text_dim).
        conditions: inputs from images and videos.
        noise: the latents, float32 (B, C, T, h, w).
        table: makes other rotary tables of the profile's own; None: they are used as they are.
    """

    experts: tuple[str, ...]
    embeddings: np.ndarray
    conditions: Conditions
    noise: np.ndarray
    table: Callable[[np.ndarray], np.ndarray] | None = None

    @classmethod
    @own_options()
    def of(cls, pipeline: Pipeline, generation: Generation, inputs: Inputs | None) -> Start:
        """Returns that of a generation: its prompts, images, videos and seed."""
        session = pipeline.session(generation.profile)
        return cls(
            transformers(pipeline.manifest),
            pipeline.encode_prompts(generation.prompts),
            replace(session.conditioning(inputs, timings=Timings(), options=generation.options), start=None),
            Noise(generation.options["seed"])(session.latents_shape),
        )

    def conditions_of(self, sampler: Sampler, run: Denoising) -> Conditions:
        """Returns the conditions of a run of single steps, of which no frame is held."""
        conditions = replace(self.conditions, held=None)
        if self.table is None:
            return conditions
        rope = _tables(sampler, run, conditions, self.table)
        return replace(conditions, steps={**conditions.steps, "rope": rope})


@own_options()
def velocity(
    sampler: Sampler,
    start: Start,
    form: str,
    maker: RoleName | None = None,
    scale: float = SCALE,
    **guidance: Any,
) -> np.ndarray:
    """Returns the velocities of all experts, float32 (experts, B, C, T, h, w). Raises as ``Sampler.denoise``.

    Args:
        sampler: the profile's.
        start: what they are computed from.
        form: the form of the loop.
        maker: the role of the program that makes the step; None for the form's full one.
        scale: of guidance.
        guidance: further attributes of ``ExpertRange``.
    """
    found = []
    for expert in start.experts:
        steps = ExpertRange.alike(expert, 0, 1, scale, **guidance)
        maker = maker or FORMS[form].makers[0]
        run = Denoising(velocity_table(TIMESTEP), [steps], start.embeddings, form, Timings(), maker=maker)
        conditions = start.conditions_of(sampler, run)
        found.append(start.noise - sampler.denoise(run, start.noise, conditions, Noise(0)))
    return np.stack(found)


def _tables(
    sampler: Sampler, run: Denoising, conditions: Conditions, table: Callable[[np.ndarray], np.ndarray]
) -> dict[str, Any]:
    """Returns a profile's rotary tables after ``table``, on the device; what else is prepared is released."""
    import jax

    made: Any = sampler.prepare(run, conditions, run.ranges[0])
    if run.form.streams:
        made = StreamedStep(sampler.programs, run.ranges[0].transformer, made).constant
    return {k: jax.device_put(table(np.asarray(one)), one.sharding) for k, one in made["rope"].items()}
