"""Runs diffusers' pipelines as the reference, and records their results and the calls of transformers.

Needs the test extra (torch, diffusers, transformers). Everything runs in float32 on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.errors import UsageError


@dataclass(frozen=True)
class ModelCall:
    """One call of a transformer.

    Attributes:
        transformer: the component's name.
        latents: the transformer's input, float32 (B, channels with those of the condition, T, h, w).
        timestep: the timestep, in the form that the pipeline passed.
        output: the velocity, float32 (B, C, T, h, w).
    """

    transformer: str
    latents: np.ndarray
    timestep: np.ndarray
    output: np.ndarray


@dataclass(frozen=True)
class Made:
    """The results of one run of the reference.

    Attributes:
        latents: final latents, float32 (B, C, T, h, w), normalised; those of the last window if there are
            several.
        frames: float32 (B, F, H, W, 3) in [0, 1].
        calls: the calls of the transformers in order; with guidance two per step, the positive prompt first.
    """

    latents: np.ndarray
    frames: np.ndarray
    calls: Sequence[ModelCall]


def load_reference(source: Path, class_name: str) -> Any:
    """Loads the reference pipeline of a checkpoint, float32, on the CPU.

    Args:
        source: the checkpoint's folder, in the diffusers layout.
        class_name: the pipeline's class, ``Variant.reference_class``.

    Raises:
        UsageError: if the reference is not installed.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import diffusers
        import torch
    except ImportError as error:
        raise UsageError(
            f"the reference is not installed: {error}", remedy="pip install 'wanrun[test]'"
        ) from None
    pipeline_class = getattr(diffusers, class_name)
    pipe = pipeline_class.from_pretrained(str(source), dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def text_pipeline(pipe: Any) -> Any:
    """Returns a pipeline of the same modules that makes a video from text alone."""
    import diffusers

    if type(pipe).__name__ != "WanImageToVideoPipeline":
        return pipe
    names = ("tokenizer", "text_encoder", "vae", "scheduler", "transformer", "transformer_2")
    text: Any = diffusers.WanPipeline(
        **{name: getattr(pipe, name) for name in names},
        boundary_ratio=pipe.config.boundary_ratio,
        expand_timesteps=pipe.config.expand_timesteps,
    )
    text.set_progress_bar_config(disable=True)
    return text


@contextmanager
def _recorded(pipe: Any) -> Iterator[list[ModelCall]]:
    """Yields a list to which the calls of the transformers are added."""
    calls: list[ModelCall] = []
    hooks = []
    for name in TRANSFORMERS:
        if (module := getattr(pipe, name, None)) is None:
            continue

        def record(
            module: Any, arguments: Any, keywords: Mapping[str, Any], output: Any, name: str = name
        ) -> None:
            arrays = (keywords["hidden_states"], keywords["timestep"], output[0])
            calls.append(ModelCall(name, *(array.numpy().copy() for array in arrays)))

        hooks.append(module.register_forward_hook(record, with_kwargs=True))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def run_reference(pipe: Any, **arguments: Any) -> Made:
    """Runs a pipeline of the reference.

    Args:
        pipe: the pipeline of ``load_reference``.
        arguments: the arguments of its call, see ``Variant.reference_arguments``.
    """
    last: list[np.ndarray] = []

    def keep(pipe: Any, step: int, timestep: Any, state: dict[str, Any]) -> dict[str, Any]:
        last[:] = [state["latents"].numpy().copy()]
        return {}

    with _recorded(pipe) as calls:
        frames = pipe(**arguments, output_type="np", callback_on_step_end=keep).frames
    (latents,) = last
    if getattr(pipe.config, "expand_timesteps", False) and "image" in arguments:
        latents[:, :, :1] = calls[-1].latents[:, :, :1]  # the held frame
    return Made(latents, np.asarray(frames), calls)
