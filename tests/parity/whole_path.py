"""diffusers' WanPipeline as the judge of whole generations, and how videos are compared with its."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
)

LATENTS = 1e-5  # the aim; seen: 1-3e-6, and the reference's own float32 noise against float64 is 1-2e-6
PROMPT = "a cat &amp; a dog,   in the  snow"
NEGATIVE = "ugly, blurry"

SOLVERS: Mapping[str, Any] = {
    "unipc": lambda config, shift: UniPCMultistepScheduler.from_config(config, flow_shift=shift),
    "dpm++": lambda config, shift: DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    ),
    "euler": lambda config, shift: FlowMatchEulerDiscreteScheduler(shift=shift),
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


def load_pipeline(checkpoint: Path) -> Any:
    """The reference pipeline of a checkpoint, float32."""
    pipeline = WanPipeline.from_pretrained(str(checkpoint), dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@contextmanager
def _counted(pipe: Any) -> Iterator[dict[str, int]]:
    """Counts the calls of each transformer."""
    calls: dict[str, int] = {}
    hooks = []
    for name in ("transformer", "transformer_2"):
        if (module := getattr(pipe, name)) is None:
            continue
        calls[name] = 0

        def count(*_: Any, name: str = name) -> None:
            calls[name] += 1

        hooks.append(module.register_forward_hook(count))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Runs torch on one thread: on arrays this small, more of them take five times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def reference(
    pipe: Any,
    *,
    solver: str = "unipc",
    flow_shift: float | None = None,
    boundary: float | None = None,
    **options: Any,
) -> Reference:
    """One generation of the reference.

    Args:
        pipe: the pipeline; it is left as it was.
        solver: one of ``SOLVERS``; with ``unipc`` and no shift the checkpoint's scheduler as it is.
        flow_shift: instead of the checkpoint's.
        boundary: instead of the checkpoint's boundary_ratio.
        options: of its call; the prompts are ``PROMPT`` and ``NEGATIVE``.
    """
    scheduler, ratio = pipe.scheduler, pipe.config.boundary_ratio
    if solver != "unipc" or flow_shift is not None:
        shift = scheduler.config.flow_shift if flow_shift is None else flow_shift
        pipe.scheduler = SOLVERS[solver](scheduler.config, shift)
    if boundary is not None:
        pipe.register_to_config(boundary_ratio=boundary)
    last: list[np.ndarray] = []

    def keep(pipe: Any, step: int, timestep: Any, state: dict[str, Any]) -> dict[str, Any]:
        last[:] = [state["latents"].numpy().copy()]
        return {}

    options |= {"prompt": PROMPT, "negative_prompt": NEGATIVE, "output_type": "np"}
    try:
        with _counted(pipe) as calls, _one_thread():
            frames = pipe(**options, callback_on_step_end=keep).frames
    finally:
        pipe.scheduler = scheduler
        pipe.register_to_config(boundary_ratio=ratio)
    return Reference(last[0], np.round(frames * 255).astype(np.uint8), calls)


def within_one_level(frames: np.ndarray, expected: np.ndarray) -> float:
    """Share of the uint8 values that differ by at most one."""
    assert frames.shape == expected.shape
    return float(np.mean(np.abs(frames.astype(int) - expected.astype(int)) <= 1))
