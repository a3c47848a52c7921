"""diffusers with guidance that its pipelines have not: its own guiders, and its authors' formula of NAG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

TEXT = 512
"""Text tokens; those of an image are in front of them."""


def formula(
    positive: np.ndarray, negative: np.ndarray, scale: float, tau: float, alpha: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the guided attention of tokens (B, S, D), and of which tokens the norm was limited."""
    away = positive * scale - negative * (scale - 1)
    ratio = np.abs(away).sum(-1, keepdims=True) / np.abs(positive).sum(-1, keepdims=True)
    limited = ratio > tau
    away = np.where(limited, away * (tau / ratio), away)
    return alpha * away + (1 - alpha) * positive, limited


class _Guided:
    """The processor of an attention to text; a pass of the negative prompt stays as it is."""

    def __init__(self, negative: torch.Tensor, settings: tuple[float, float, float]) -> None:
        self._negative, self._settings, self._own = negative, settings, WanAttnProcessor()
        self.limited = list[np.ndarray]()

    def __call__(self, attn: Any, hidden: torch.Tensor, text: torch.Tensor, *rest: Any) -> torch.Tensor:
        own, settings = text[:, -TEXT:], self._settings
        if torch.equal(own, self._negative.expand_as(own)):
            return self._own(attn, hidden, text, *rest)
        nothing, project = torch.nn.Identity(), attn.to_out
        with patch.dict(attn._modules, to_out=torch.nn.ModuleList([nothing, nothing])):
            whole = self._own(attn, hidden, text, *rest).double().numpy()
            with patch.dict(attn._modules, add_k_proj=None):
                negative = self._negative.expand_as(own)
                away, kept = (self._own(attn, hidden, one, *rest).double().numpy() for one in (negative, own))
        found, limited = formula(kept, away, *settings)
        self.limited.append(limited)
        return project[0](torch.from_numpy(found + whole - kept).to(hidden.dtype))  # with that of an image


@contextmanager
def avoiding(
    transformer: Any, negative: np.ndarray, settings: tuple[float, float, float]
) -> Iterator[list[np.ndarray]]:
    """Guides a transformer away from a negative prompt.

    Args:
        transformer: diffusers' model.
        negative: the embeddings (1, 512, text_dim).
        settings: scale, tau and alpha.

    Returns:
        Of each attention that was guided, the tokens whose norm was limited.
    """
    with torch.no_grad():
        judge = _Guided(transformer.condition_embedder.text_embedder(torch.from_numpy(negative)), settings)
    blocks = [*transformer.blocks, *getattr(transformer, "vace_blocks", ())]
    own = [block.attn2.processor for block in blocks]
    try:
        for block in blocks:
            block.attn2.processor = judge
        yield judge.limited
    finally:
        for block, processor in zip(blocks, own, strict=True):
            block.attn2.processor = processor


@contextmanager
def guided_between(pipe: Any, start: float, end: float) -> Iterator[None]:
    """Lets diffusers' pipeline have guidance in the steps that diffusers' own guider says."""
    if (start, end) == (0, 1):
        yield
        return
    from diffusers.guiders import ClassifierFreeGuidance

    guider = ClassifierFreeGuidance(start=start, stop=end)

    def enabled(pipe: Any) -> bool:
        if pipe.current_timestep is None:  # before the steps, when prompts are encoded
            return True
        steps = pipe.scheduler.timesteps.tolist()
        guider.set_state(steps.index(float(pipe.current_timestep)), len(steps), pipe.current_timestep)
        return guider.num_conditions == 2

    with patch.object(type(pipe), "do_classifier_free_guidance", property(enabled)):
        yield


@contextmanager
def combined_by(pipe: Any, name: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Lets a guider of diffusers say the velocity of each step of UniPC, of passes that the pipeline makes.

    A pass that skips layers is the positive one once more, with the guider's own hooks.
    """
    from diffusers import UniPCMultistepScheduler

    calls: list[tuple[Any, Any, Any]] = []
    models = {pipe.transformer: "guidance_scale", pipe.transformer_2: "guidance_scale_2"}
    hooks = [
        model.register_forward_hook(
            lambda model, _, given, made: calls.append((model, given, made[0].float())), with_kwargs=True
        )
        for model in models
    ]
    step = UniPCMultistepScheduler.step

    def guided(scheduler: Any, output: Any, timestep: Any, *rest: Any, **more: Any) -> Any:
        timesteps = scheduler.timesteps.tolist()
        (model, given, _), *_ = calls
        guider = guider_of(name, options[models[model]], options)
        guider.set_state(timesteps.index(float(timestep)), len(timesteps), timestep)
        if len(calls) == 2 and guider.num_conditions == 3:
            guider._count_prepared = 2
            guider.prepare_models(model)
            model(**given)
            guider.cleanup_models(model)
        passes = [each for *_, each in calls]
        calls.clear()
        if len(passes) == 1:
            assert guider._step >= options.get("zero_steps", 0)
            return step(scheduler, output, timestep, *rest, **more)
        return step(scheduler, guider.forward(*passes).pred, timestep, *rest, **more)

    try:
        with patch.object(UniPCMultistepScheduler, "step", guided):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def guider_of(name: str, scale: float, options: Mapping[str, Any]) -> Any:
    """Diffusers' guider by its name here."""
    from diffusers.guiders import ClassifierFreeZeroStarGuidance, SkipLayerGuidance
    from diffusers.hooks import LayerSkipConfig

    if name == "cfg-zero":
        return ClassifierFreeZeroStarGuidance(scale, options.get("zero_steps", 1), enabled=True)
    own = {f"skip_layer_guidance_{key}": options[f"skip_{key}"] for key in ("scale", "start")}
    own["skip_layer_guidance_stop"] = options["skip_end"]
    # Its ``skip_layer_guidance_layers`` makes a config without a list of layers.
    return SkipLayerGuidance(scale, skip_layer_config=LayerSkipConfig(options["skip_layers"]), **own)
