"""diffusers' pipelines as the reference: loads one, runs it and records its transformers' calls.

Needs the test extra (torch, diffusers, transformers). Everything runs on the CPU.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wanbuild.variants.table import variants
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.artifact.model import Chunking
from wanrun.errors import UsageError
from wanrun.media.inputs import Media


@dataclass(frozen=True)
class ModelCall:
    """One call of a transformer.

    Attributes:
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

    @property
    def levels(self) -> np.ndarray:
        """The frames in uint8 (B, F, H, W, 3), rounded to the nearest level."""
        return np.round(self.frames * 255).astype(np.uint8)

    def count(self, transformer: str) -> int:
        """Returns how often a transformer was called."""
        return sum(call.transformer == transformer for call in self.calls)


class Reference:
    """diffusers' pipeline of a checkpoint in the diffusers layout.

    ``dtype`` is torch's, of everything but the VAE, which is float32, as diffusers' documentation says. The
    constructor raises UsageError if diffusers or torch is not installed, or diffusers has no such pipeline.
    """

    def __init__(self, source: Path, variant: str, dtype: str = "float32") -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        try:
            import diffusers
            import torch
        except ImportError as error:
            raise UsageError(
                "not_installed",
                f"the reference is not installed: {error}",
                remedy="pip install '.[test]' in the checkout",
            ) from None
        self.variant = variants()[variant]
        pipeline_class = getattr(diffusers, self.variant.reference_class, None)
        if pipeline_class is None:
            raise UsageError(
                "unsupported",
                f"nothing here compares {variant} with a checkpoint: diffusers has no pipeline of it",
                remedy="leave --source out",
            )
        self.pipe = pipeline_class.from_pretrained(
            str(source), dtype=getattr(torch, dtype), local_files_only=True
        )
        self.pipe.vae.to(torch.float32)
        self.pipe.set_progress_bar_config(disable=True)

    def text_pipeline(self) -> Any:
        """Returns a pipeline of the same modules that makes a video from text only."""
        import diffusers

        if type(self.pipe).__name__ != "WanImageToVideoPipeline":
            return self.pipe
        names = ("tokenizer", "text_encoder", "vae", "scheduler", "transformer", "transformer_2")
        text: Any = diffusers.WanPipeline(
            **{name: getattr(self.pipe, name) for name in names},
            boundary_ratio=self.pipe.config.boundary_ratio,
            expand_timesteps=self.pipe.config.expand_timesteps,
        )
        text.set_progress_bar_config(disable=True)
        return text

    def run(
        self,
        media: Media | None = None,
        *,
        seed: int | None = None,
        solver: str | None = None,
        flow_shift: float | None = None,
        boundary: float | None = None,
        timesteps: Sequence[float] | None = None,
        **arguments: Any,
    ) -> Made:
        """Makes a video; the pipeline is left as it was.

        Args:
            media: images and videos; None for text only.
            seed: of torch's global generator, which also makes the noise of a scheduler's steps; None leaves
                it as it is.
            solver: one of ``schedulers``; None: the checkpoint's scheduler as it is, unless a shift is given.
            flow_shift: replaces the checkpoint's.
            boundary: replaces the checkpoint's boundary_ratio.
            timesteps: explicit ones, which the pipeline has no option for; only for ``euler`` or ``lcm``.
            arguments: of the pipeline's call, by its names.
        """
        pipe = self.pipe if media is not None else self.text_pipeline()
        last: list[np.ndarray] = []

        def keep(pipe: Any, step: int, timestep: Any, state: dict[str, Any]) -> dict[str, Any]:
            if step == 0:  # of the video, or of its next chunk
                last.append(state["latents"].numpy().copy())
            last[-1] = state["latents"].numpy().copy()
            return {}

        if seed is not None:
            import torch

            arguments["generator"] = torch.manual_seed(seed)
        if timesteps is not None:
            arguments["num_inference_steps"] = len(timesteps)
        if (partition := getattr(pipe.transformer.config, "chunk_partition", None)) is not None:
            arguments["chunk_partition"] = self._chunks(partition, arguments["num_frames"])
        changed = _changed(pipe, solver, flow_shift, boundary, timesteps)
        with changed, _recorded(pipe) as calls, _given_kept(pipe, last):
            frames = self.call(pipe, media, output_type="np", callback_on_step_end=keep, **arguments)
        latents = np.concatenate([_frames_second(one) if self.variant.flow_map else one for one in last], 2)
        if getattr(pipe.config, "expand_timesteps", False) and media is not None and media.image:
            latents[:, :, :1] = calls[-1].latents[:, :, :1]  # the held frame
        return Made(latents, np.asarray(frames), calls)

    def _chunks(self, partition: Sequence[int], num_frames: int) -> list[int]:
        """Returns the number of latent frames in each chunk of a video, cut as a published video is."""
        chunks = Chunking(first=partition[0], each=max(partition))
        return list(chunks.lengths((num_frames - 1) // self.variant.vae_temporal + 1))

    def call(self, pipe: Any, media: Media | None, **arguments: Any) -> Any:
        """Calls a pipeline with media, under that pipeline's names for them; returns its frames."""
        if media is not None:
            arguments = self.variant.reference_arguments(media, arguments)
        return pipe(**arguments).frames


def _frames_second(latents: np.ndarray) -> np.ndarray:
    """Returns latents (B, T, C, h, w), AnyFlow's own layout, as (B, C, T, h, w)."""
    return np.moveaxis(latents, 1, 2)


def schedulers() -> Mapping[str, Callable[[Any, float], Any]]:
    """Returns functions from a checkpoint's config and a shift to a scheduler, by our solvers' names."""
    import diffusers

    return {
        "unipc": lambda config, shift: diffusers.UniPCMultistepScheduler.from_config(
            config, flow_shift=shift
        ),
        "dpm++": lambda config, shift: diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
        ),
        "euler": lambda config, shift: diffusers.FlowMatchEulerDiscreteScheduler(shift=shift),
        "lcm": lambda config, shift: diffusers.FlowMatchLCMScheduler(shift=shift),
        "flow-map": lambda config, shift: diffusers.FlowMapEulerDiscreteScheduler(shift=shift),
    }


def open_media(source: Any) -> Any:
    """Returns a file as a Pillow image, a folder of numbered frames as a list of them, a tuple as a tuple."""
    from diffusers.utils import load_image

    if isinstance(source, tuple):
        return tuple(open_media(file) for file in source)
    if not Path(source).is_dir():
        return load_image(str(source))
    files = sorted(Path(source).iterdir(), key=lambda file: int(file.stem.removeprefix("frame")))
    return [load_image(str(file)) for file in files]


@contextmanager
def _changed(
    pipe: Any,
    solver: str | None,
    flow_shift: float | None,
    boundary: float | None,
    timesteps: Sequence[float] | None,
) -> Iterator[None]:
    """Gives the pipeline another scheduler and boundary while the context is open."""
    scheduler, ratio = pipe.scheduler, getattr(pipe.config, "boundary_ratio", None)
    solver_of_its_own = "flow-map" if "FlowMap" in type(scheduler).__name__ else "unipc"
    if solver not in (None, solver_of_its_own) or flow_shift is not None:
        stated = scheduler.config.get("flow_shift", scheduler.config.get("shift"))
        shift = stated if flow_shift is None else flow_shift
        make = schedulers()[solver or solver_of_its_own]
        pipe.scheduler = make(scheduler.config, shift if timesteps is None else 1.0)
    if timesteps is not None:
        own = pipe.scheduler.set_timesteps
        pipe.scheduler.set_timesteps = functools.partial(own, timesteps=list(timesteps))
    if boundary is not None:
        pipe.register_to_config(boundary_ratio=boundary)
    try:
        yield
    finally:
        pipe.scheduler = scheduler
        if boundary is not None:
            pipe.register_to_config(boundary_ratio=ratio)


@contextmanager
def _given_kept(pipe: Any, chunks: list[np.ndarray]) -> Iterator[None]:
    """Adds to a list the first chunk that a pipeline encodes from given media, since no step makes it."""
    if not hasattr(pipe.transformer.config, "chunk_partition"):
        yield
        return
    own = pipe.encode_video

    def encode(*arguments: Any, **named: Any) -> Any:
        made = own(*arguments, **named)
        chunks.append(made.numpy().copy())
        return made

    pipe.encode_video = encode
    try:
        yield
    finally:
        del pipe.encode_video


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
            if output[0] is None:  # a pass that keeps a chunk
                return
            tensors = (keywords["hidden_states"], keywords["timestep"], output[0])
            latents, timestep, velocity = (tensor.numpy().copy() for tensor in tensors)
            if "r_timestep" not in keywords:
                calls.append(ModelCall(name, latents, timestep, velocity))
                return
            # Of a flow map both prompts are in one call, the negative one first.
            arrays = (_frames_second(latents), timestep, _frames_second(velocity))
            halves = [np.split(array, 1 + pipe.do_classifier_free_guidance) for array in arrays]
            calls.extend(ModelCall(name, *half) for half in reversed([*zip(*halves, strict=True)]))

        hooks.append(module.register_forward_hook(record, with_kwargs=True))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
