"""diffusers' pipelines as the judge: what they make of a prompt and media, and what went through on the way.

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
        transformer: its name.
        latents: the model's input, (B, channels with those of the condition, T, h, w).
        timestep: as it was given.
        output: the velocity.
    """

    transformer: str
    latents: np.ndarray
    timestep: np.ndarray
    output: np.ndarray


@dataclass(frozen=True)
class Made:
    """What one run of the reference made.

    Attributes:
        latents: final, float32 (B, C, T, h, w), normalised; of the last segment where there are several.
        frames: float32 (B, F, H, W, 3) in [0, 1].
        calls: of the transformers, in order; with guidance two a step, the positive prompt first.
    """

    latents: np.ndarray
    frames: np.ndarray
    calls: Sequence[ModelCall]


def load_reference(source: Path, class_name: str) -> Any:
    """The reference pipeline of a checkpoint, float32, on the CPU.

    Args:
        source: the checkpoint's folder, in the diffusers layout.
        class_name: of the pipeline: ``Variant.reference_class``.

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
    """The pipeline that makes a video from text alone, of the same modules."""
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
    """Records the calls of the transformers."""
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
    """One run of a pipeline.

    Args:
        pipe: of ``load_reference``.
        arguments: of its call, see ``Variant.reference_arguments``.
    """
    last: list[np.ndarray] = []

    def keep(pipe: Any, step: int, timestep: Any, state: dict[str, Any]) -> dict[str, Any]:
        last[:] = [state["latents"].numpy().copy()]
        return {}

    with _recorded(pipe) as calls:
        frames = pipe(**arguments, output_type="np", callback_on_step_end=keep).frames
    (latents,) = last
    if getattr(pipe.config, "expand_timesteps", False) and "image" in arguments:
        latents[:, :, :1] = calls[-1].latents[:, :, :1]  # the frame that was held
    return Made(latents, np.asarray(frames), calls)
