"""Whole generations through the command lines, and what diffusers makes of the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from helpers.fake_pipeline import write_lines
from helpers.nag_reference import avoiding
from helpers.reference_models import relative_error
from wanbuild.check.reference import frames_check
from wanbuild.check.reference_pipeline import Made, Reference, open_media
from wanrun.artifact.guiders import OWN_OPTIONS
from wanrun.artifact.manifest import TRANSFORMERS, read_manifest
from wanrun.denoising.guided_steps import GUIDED
from wanrun.media.inputs import Media

LATENTS = 1e-5  # the aim; seen: 1-3e-6, and the reference's own float32 noise against float64 is 1-2e-6
PROMPT = "a cat &amp; a dog,   in the  snow"
NEGATIVE = "ugly, blurry"
LOOPS = ("step", "scan")


def generate(reference: Reference, **options: Any) -> Made:
    """One generation of the reference from ``PROMPT`` and ``NEGATIVE``; options are those of its ``run``."""
    return reference.run(prompt=PROMPT, negative_prompt=NEGATIVE, **options)


def check(
    latents: np.ndarray,
    frames: np.ndarray,
    expected: Made,
    record: Callable[[str, object], None] = lambda name, value: None,
    video: int = 0,
) -> None:
    """Holds the latents of all videos, and the frames of one, against the reference's.

    The reference's latents have those of reference images in front.
    """
    assert latents.dtype == np.float32 and frames.dtype == np.uint8
    own = expected.latents[:, :, expected.latents.shape[2] - latents.shape[2] :]
    assert latents.shape == own.shape and frames.shape == expected.frames[video].shape
    error = relative_error(latents, own)
    beyond = frames_check("video", frames, expected.frames[video]).error
    record("latents_relative_error", error)
    print(f"latents {error:.1e}, {beyond:.2%} of uint8 off by more than a level", flush=True)
    assert error < LATENTS
    assert beyond <= 1e-3
    assert frames.std() > 20  # a constant video would agree with anything


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


@dataclass(frozen=True)
class Case:
    """One generation.

    Args:
        steps: denoising steps.
        media: by the keys of a prompts file: a file, a folder, or a tuple of files.
        seed: of the noise.
        options: others, by the keys of a prompts file.
    """

    steps: int
    media: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """Its line of a prompts file."""
        media = {
            name: [str(file) for file in value] if isinstance(value, tuple) else str(value)
            for name, value in self.media.items()
        }
        return {"prompt": PROMPT, "steps": self.steps, "seed": self.seed, **media, **self.options}


class WholePath:
    """A toy's artifact and the reference, which make the same cases.

    Args:
        toy: the checkpoint and its artifact.
        commands: runs the command.
        folder: for what the command writes.
        cases: by name.
        size: width, height and frames.
        scale: the guidance scale of cases that have none.
    """

    def __init__(
        self,
        toy: tuple[Path, Path],
        commands: Any,
        folder: Path,
        cases: Mapping[str, Case],
        size: tuple[int, int, int] = (96, 64, 9),
        scale: float = 3.0,
    ) -> None:
        checkpoint, self.artifact = toy
        self._commands, self._folder, self.cases, self._scale = commands, folder, cases, scale
        self._size = dict(zip(("width", "height", "num_frames"), size, strict=True))
        self.reference = Reference(checkpoint, read_manifest(self.artifact).model.variant)
        self.timings: dict[str, Any] = {}
        self._made: dict[str, Made] = {}

    def ours(self, name: str, loop: str) -> tuple[np.ndarray, np.ndarray]:
        """Latents and frames; all cases are made by one run of the command a form of the loop."""
        if loop not in self.timings:
            self._run(loop)
        index = str(list(self.cases).index(name) + 1).zfill(len(str(len(self.cases))))
        files = (self._folder / f"{loop}-{kind}-{index}.npy" for kind in ("latents", "video"))
        latents, frames = map(np.load, files)
        return latents, frames

    def _run(self, loop: str) -> None:
        lines = [case.line() for case in self.cases.values()]
        references = next(iter(self.cases.values())).media.get("reference_image", ())
        timing = self._folder / f"{loop}.json"
        self._commands.succeeds(
            *("wanrun", "--artifact", self.artifact, "--negative-prompt", NEGATIVE, "--loop", loop),
            *("--prompts", write_lines(self._folder / "cases.jsonl", *lines)),
            *("--guidance-scale", self._scale, "--no-embedding-cache"),
            *(item for file in references for item in ("--reference-image", file)),
            *("--save-latents", self._folder / f"{loop}-latents-{{index}}.npy"),
            *("--output", self._folder / f"{loop}-video-{{index}}.npy", "--timing-json", timing),
        )
        self.timings[loop] = json.loads(timing.read_text())
        assert self.timings[loop]["cache_misses"] == 0

    def forget(self) -> None:
        """Lets the reference make its cases anew; what the command made is kept."""
        self._made.clear()

    def theirs(self, name: str) -> Made:
        """What the reference makes; computed once."""
        if name not in self._made:
            self._made[name] = self.run(self.cases[name])
        return self._made[name]

    def run(self, case: Case) -> Made:
        """The reference's run of a case."""
        given = {name: open_media(value) for name, value in case.media.items()}
        own = {key: value for key, value in case.options.items() if key in ("mode", "segment_overlap")}
        options = {"guidance_scale": self._scale, **case.options}
        shares = [options.pop(name, default) for name, default in GUIDED.items()]
        guider, nag = options.pop("guider", None), options.pop("nag_scale", None)
        guiding, pipe = {**options}, self.reference.pipe
        options = {key: value for key, value in options.items() if key not in OWN_OPTIONS}
        with ExitStack() as changed:
            if guider is not None:
                changed.enter_context(combined_by(pipe, guider, guiding))
            for expert in TRANSFORMERS if nag else ():
                negative = pipe._get_t5_prompt_embeds([NEGATIVE], max_sequence_length=512)
                changed.enter_context(
                    avoiding(getattr(pipe, expert), negative.detach().numpy(), (nag, 2.5, 0.25))
                )
            changed.enter_context(guided_between(pipe, *shares))
            return generate(
                self.reference,
                media=Media(**given, **own) if given else None,
                seed=case.seed,
                num_inference_steps=case.steps,
                **self._size,
                **{key: value for key, value in options.items() if key not in own},
            )

    def calls(self, name: str) -> tuple[int, ...]:
        """How often the reference called each expert."""
        made = self.theirs(name)
        return tuple(made.count(expert) for expert in TRANSFORMERS)

    def check(self, name: str, record: Callable[[str, object], None], loop: str = "step") -> None:
        """Holds a case against the reference."""
        check(*self.ours(name, loop), self.theirs(name), record)

    def check_loops(self, name: str) -> None:
        """Holds the forms of the loop against each other: they compute the same bits."""
        for one, other in zip(*(self.ours(name, loop) for loop in LOOPS), strict=True):
            assert np.array_equal(one, other)
