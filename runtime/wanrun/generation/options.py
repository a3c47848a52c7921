"""The options of one generation: defaults from the manifest, and checks against the profile."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from wanrun.artifact.manifest import Manifest, Profile
from wanrun.denoising.schedule import transformers
from wanrun.denoising.steps import LOOP_PROGRAMS
from wanrun.errors import ArtifactError, UsageError, field
from wanrun.media.types import OVERLAPS

EXPERT_OPTIONS = ("guidance_scale_2", "boundary")
"""Options of a generation that only a model with two experts has."""

_OPTION_TASKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"conditioning_scale": ("vace", "VACE"), "segment_overlap": ("animate", "Animate")}
)
TASK_OPTIONS = tuple(_OPTION_TASKS)
"""Options of a generation that only the models of one task have."""

MAX_STEPS = 10_000  # a table of ten times more takes seconds, and nothing is gained by it
_MAX_GUIDANCE = float(np.finfo(np.float32).max)  # a float: NumPy would cast what it is compared with

_RANGES: Mapping[str, tuple[float, float, str]] = MappingProxyType(
    {
        "fps": (0.1, 240, "0.1 to 240"),  # what every container can hold
        "guidance_scale": (-_MAX_GUIDANCE, _MAX_GUIDANCE, "a number"),
        "guidance_scale_2": (-_MAX_GUIDANCE, _MAX_GUIDANCE, "a number"),
        "boundary": (0, 1, "0 to 1"),
        "conditioning_scale": (-_MAX_GUIDANCE, _MAX_GUIDANCE, "a number"),
    }
)


def has_guidance(manifest: Manifest, scale: float | None = None) -> bool:
    """Whether this guidance scale, the model's own where None, turns guidance on."""
    return bool((manifest.model["defaults"]["guidance_scale"] if scale is None else scale) > 1)


def leading_latents(manifest: Manifest, profile: Profile) -> int:
    """Latent frames in front of the video's own: Animate's of the image, VACE's of its references."""
    return int(manifest.model.get("leading_latents", 0)) + profile.num_references


def latents_shape(manifest: Manifest, profile: Profile) -> tuple[int, int, int, int, int]:
    """Shape (B, C, T, h, w) of a profile's latents, as diffusers takes them, with the leading ones."""
    model = manifest.model
    frames = (profile.num_frames - 1) // model["vae_temporal"] + 1
    return (
        profile.num_videos,
        model["latent_channels"],
        frames + leading_latents(manifest, profile),
        profile.height // model["vae_spatial"],
        profile.width // model["vae_spatial"],
    )


def check_latents(latents: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raises UsageError unless latents are finite float32 of this shape."""
    if latents.shape != shape or latents.dtype != np.float32:
        raise UsageError(
            "the initial latents do not fit the profile",
            expected=f"float32 {shape}",
            found=f"{latents.dtype} {latents.shape}",
            remedy="give them in the layout (B, C, T, h, w)",
        )
    if not np.isfinite(latents).all():
        raise UsageError("the initial latents are not finite", expected="numbers", found="NaN or infinity")


def check_numbers(given: Mapping[str, Any]) -> None:
    """Refuses numbers that no artifact and no video can have.

    Args:
        given: options by name; one that is absent or None is the artifact's default.

    Raises:
        UsageError: naming the option that is out of range.
    """
    for name, (least, most, expected) in _RANGES.items():
        value = given.get(name)
        if value is not None and not least <= value <= most:  # NaN too
            raise UsageError(f"{field(name)} is out of range", expected=expected, found=value)
    overlap = given.get("segment_overlap")
    if overlap is not None and overlap not in OVERLAPS:
        raise UsageError(f"{field('segment_overlap')} is out of range", expected="1 or 5", found=overlap)
    for name in ("steps", "num_steps"):
        value = given.get(name)
        if value is not None and value > MAX_STEPS:
            raise UsageError("the number of steps is too large", expected=f"at most {MAX_STEPS}", found=value)


def check_experts(manifest: Manifest, guidance: bool, given: Mapping[str, Any]) -> None:
    """Refuses options of the low-noise expert that would have no effect.

    Args:
        manifest: the artifact's manifest.
        guidance: whether guidance is on, which ``guidance_scale`` alone decides.
        given: options by name; one that is absent or None was not given.

    Raises:
        UsageError: for one of ``EXPERT_OPTIONS`` with a single transformer, or a ``guidance_scale_2`` above 1
            without guidance.
    """
    for name in EXPERT_OPTIONS:
        if given.get(name) is not None and len(transformers(manifest)) == 1:
            raise UsageError(
                f"{field(name)} has no effect: this model has one transformer",
                remedy="leave it out; it is for models with two experts",
            )
    scale = given.get("guidance_scale_2")
    if scale is not None and scale > 1 and not guidance:
        first = field("guidance_scale")
        raise UsageError(
            f"{field('guidance_scale_2')} has no effect: guidance is off",
            expected=f"{first} above 1 and a profile with guidance, for both experts",
            found=scale,
            remedy=f"raise {first}, or leave the other out",
        )


def check_task_options(manifest: Manifest, given: Mapping[str, Any]) -> None:
    """Refuses options that the models of another task have.

    Args:
        manifest: the artifact's manifest.
        given: options by name; one that is absent or None was not given.

    Raises:
        UsageError: for one of ``TASK_OPTIONS`` that this model does not have.
    """
    for name, (task, models) in _OPTION_TASKS.items():
        if given.get(name) is not None and manifest.model.get("task") != task:
            raise UsageError(
                f"{field(name)} has no effect: this is no {models} model",
                remedy=f"leave it out; it is for {models} models",
            )


def _task_defaults(manifest: Manifest) -> dict[str, Any]:
    """The defaults of those of ``TASK_OPTIONS`` that this model has."""
    model = manifest.model
    defaults = {"conditioning_scale": 1.0, "segment_overlap": OVERLAPS[0], **model["defaults"]}
    return {name: defaults[name] for name, (task, _) in _OPTION_TASKS.items() if model.get("task") == task}


def loop_forms(profile: Profile) -> tuple[str, ...]:
    """The forms of the denoising loop that a profile is built with, the preferred one first."""
    built = {name for programs in profile.programs.values() for name in programs}
    return tuple(form for form, program in LOOP_PROGRAMS.items() if program in built)


def resolve_loop(profile: Profile, loop: str | None) -> str:
    """The form of the denoising loop to run: the given one, or the preferred one where it is None.

    Raises:
        UsageError: if there is no such form.
        ArtifactError: if the profile is not built with it, saying which it is built with.
    """
    name, built = field("loop"), loop_forms(profile)
    if loop is not None and loop not in LOOP_PROGRAMS:
        raise UsageError(f"{name} cannot be {loop!r}", expected="one of " + ", ".join(LOOP_PROGRAMS))
    form = loop or next(iter(built), "step")
    if form not in built:
        raise ArtifactError(
            f"profile {profile.name} has no program for {name} {form}",
            found=f"one for {' and '.join(built) or 'no form'}",
            remedy="add it with wanbuild compile --loop both",
        )
    return form


def _check_max_steps(profile: Profile, loop: str, num_steps: int) -> None:
    """Raises UsageError if the scan form is asked for more steps than its table holds."""
    if loop == "scan" and num_steps > profile.options["max_steps"]:
        other = " --loop step," if "step" in loop_forms(profile) else ""
        raise UsageError(
            f"the number of steps is too large for the scan form of profile {profile.name}",
            expected=f"at most {profile.options['max_steps']}",
            found=num_steps,
            remedy=f"use fewer steps,{other} or wanbuild compile with a larger --max-steps",
        )


def resolve_options(manifest: Manifest, profile: Profile, /, **given: Any) -> dict[str, Any]:
    """The options of a generation with the manifest's defaults filled in: what the metadata records.

    Args:
        manifest: the artifact's manifest.
        profile: the chosen one. Without guidance its guidance scales are 1, and it has no negative prompt.
        given: keywords of ``Pipeline.generate`` by name, ``guidance_scale`` and ``num_steps`` among them.
            None is the default, and so is the absence of ``loop`` or of one of ``EXPERT_OPTIONS`` and
            ``TASK_OPTIONS``. The default of ``guidance_scale_2`` is the given ``guidance_scale``; where
            neither is given, both are the manifest's.

    Returns:
        What was given, width, height and num_frames, and loop. ``EXPERT_OPTIONS`` are among them for a model
        with two experts alone, and each of ``TASK_OPTIONS`` for the models of its task.

    Raises:
        UsageError: for a number out of range, an option that would have no effect, or more steps than the
            scan form is built for.
        ArtifactError: for a form of the loop that is not built.
    """
    check_numbers(given)
    model, scale = manifest.model, given["guidance_scale"]
    defaults = {**model["defaults"], "boundary": model.get("boundary_ratio")}
    if scale is None:
        scale = defaults["guidance_scale"]
    else:
        defaults["guidance_scale_2"] = scale
    check_experts(manifest, profile.guidance and scale > 1, given)
    check_task_options(manifest, given)
    experts = EXPERT_OPTIONS if len(transformers(manifest)) > 1 else ()
    names = [name for name in given if name not in (*EXPERT_OPTIONS, *TASK_OPTIONS)]
    for name in experts:
        if given.get(name) is None and type(defaults.get(name)) not in (int, float):
            raise ArtifactError(
                f"the artifact has two experts and no {name}",
                expected="a number",
                found=repr(defaults.get(name)),
                remedy="convert the checkpoint again",
            )
    options: dict[str, Any] = {
        name: defaults.get(name) if given.get(name) is None else given[name] for name in (*names, *experts)
    }
    options |= {name: float(options[name]) for name in ("guidance_scale", *experts)}
    for name, default in _task_defaults(manifest).items():
        value = default if given.get(name) is None else given[name]
        options[name] = float(value) if name == "conditioning_scale" else int(value)
    options |= {"width": profile.width, "height": profile.height, "num_frames": profile.num_frames}
    if not profile.guidance:
        off = {"guidance_scale": 1.0, "guidance_scale_2": 1.0, "negative_prompt": None}
        options |= {name: value for name, value in off.items() if name in options}
    options["loop"] = resolve_loop(profile, given.get("loop"))
    _check_max_steps(profile, options["loop"], options["num_steps"])
    return options
