"""diffusers' WanPipeline as the judge of whole generations, and how videos are compared with its."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchLCMScheduler,
    UniPCMultistepScheduler,
)

from helpers.torch_threads import one_thread
from wanbuild.check.reference_pipeline import run_reference
from wanrun.artifact.manifest import TRANSFORMERS

LATENTS = 1e-5  # the aim; seen: 1-3e-6, and the reference's own float32 noise against float64 is 1-2e-6
PROMPT = "a cat &amp; a dog,   in the  snow"
NEGATIVE = "ugly, blurry"

SOLVERS: Mapping[str, Any] = {
    "unipc": lambda config, shift: UniPCMultistepScheduler.from_config(config, flow_shift=shift),
    "dpm++": lambda config, shift: DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    ),
    "euler": lambda config, shift: FlowMatchEulerDiscreteScheduler(shift=shift),
    "lcm": lambda config, shift: FlowMatchLCMScheduler(shift=shift),
}
"""By our names, the reference's scheduler from a checkpoint's config and a shift."""


@dataclass(frozen=True)
class Reference:
    """What the reference made.

    Attributes:
        latents: the final latents, float32 (B, C, T, h, w).
        frames: uint8 (B, T, H, W, 3).
        calls: of each transformer, by name.
    """

    latents: np.ndarray
    frames: np.ndarray
    calls: Mapping[str, int]


def reference(
    pipe: Any,
    *,
    solver: str = "unipc",
    flow_shift: float | None = None,
    boundary: float | None = None,
    timesteps: Sequence[float] | None = None,
    **options: Any,
) -> Reference:
    """One generation of the reference.

    Args:
        pipe: the pipeline; it is left as it was.
        solver: one of ``SOLVERS``; with ``unipc`` and no shift the checkpoint's scheduler as it is.
        flow_shift: instead of the checkpoint's.
        boundary: instead of the checkpoint's boundary_ratio.
        timesteps: explicit ones, which the pipeline has no option for; of ``euler`` or ``lcm``.
        options: of its call; the prompts are ``PROMPT`` and ``NEGATIVE``. Schedulers are not given the
            generator: they take noise from torch's own, which ``torch.manual_seed`` returns.
    """
    scheduler, ratio = pipe.scheduler, pipe.config.boundary_ratio
    if solver != "unipc" or flow_shift is not None:
        shift = scheduler.config.flow_shift if flow_shift is None else flow_shift
        pipe.scheduler = SOLVERS[solver](scheduler.config, shift if timesteps is None else 1.0)
        if timesteps is not None:
            own = pipe.scheduler.set_timesteps
            pipe.scheduler.set_timesteps = functools.partial(own, timesteps=list(timesteps))
            options["num_inference_steps"] = len(timesteps)
    if boundary is not None:
        pipe.register_to_config(boundary_ratio=boundary)
    try:
        with one_thread():
            made = run_reference(pipe, **options, prompt=PROMPT, negative_prompt=NEGATIVE)
    finally:
        pipe.scheduler = scheduler
        pipe.register_to_config(boundary_ratio=ratio)
    calls = dict.fromkeys((name for name in TRANSFORMERS if getattr(pipe, name) is not None), 0)
    for call in made.calls:
        calls[call.transformer] += 1
    return Reference(made.latents, np.round(made.frames * 255).astype(np.uint8), calls)


def within_one_level(frames: np.ndarray, expected: np.ndarray) -> float:
    """Share of the uint8 values that differ by at most one."""
    assert frames.shape == expected.shape
    return float(np.mean(np.abs(frames.astype(int) - expected.astype(int)) <= 1))
