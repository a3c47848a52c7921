"""The options by which a generation is guided: scales, shares of the steps, guiders and NAG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.guiders import GUIDERS, NAG_DEFAULTS, OWN_OPTIONS
from wanrun.artifact.programs import Profile
from wanrun.denoising.guided_steps import GUIDED, guided_steps
from wanrun.denoising.steps import ExpertRange
from wanrun.errors import ArtifactError, UsageError, field

_CHOSEN = frozenset({"guider", *OWN_OPTIONS, *NAG_DEFAULTS, *GUIDED})


def check_guidance(profile: Profile, scale: float | None) -> None:
    """Raises UsageError for a given scale that needs another profile."""
    name = field("guidance_scale")
    if scale is not None and scale > 1 and not profile.guidance:
        raise UsageError(
            "no_effect",
            f"{name} has no effect: profile {profile.name} has no guidance",
            expected="at most 1",
            found=f"{scale:g}",
            remedy="leave it out, or use a profile with guidance",
        )


def guided_options(
    options: Mapping[str, Any], artifact: Artifact, profile: Profile, guidance: bool
) -> dict[str, Any]:
    """Returns options as a generation has them, with those of guidance that are not as usual.

    ``options`` are all of them by name, with defaults; None for a guider's own that is not given. Without
    ``guidance`` no step has two passes: both scales are 1, and there is no negative prompt but for NAG.
    Raises UsageError for an option that would have no effect; ArtifactError for a guider, or NAG, that the
    profile is not built for.
    """
    chosen = {**_guided_by(options, artifact, profile, guidance), **_avoiding(options, artifact, profile)}
    shares = {name: default if options[name] is None else options[name] for name, default in GUIDED.items()}
    found = {name: value for name, value in options.items() if name not in _CHOSEN} | chosen
    if not guidance:
        found |= {name: 1.0 for name in ("guidance_scale", "guidance_scale_2") if name in options}
        if "nag_scale" not in chosen:
            found["negative_prompt"] = None
    return found | shares if guidance and shares != GUIDED else found


def check_guided_steps(options: Mapping[str, Any], ranges: Sequence[ExpertRange]) -> None:
    """Raises UsageError for shares of the steps that run which leave none with guidance, or a third pass.

    ``options`` are a generation's, ``ranges`` its steps.
    """
    steps = sum(part.last - part.first for part in ranges)
    if GUIDED.keys() <= options.keys() and not any(part.guided for part in ranges):
        first, last = guided_steps(options, steps)
        start, end = (field(name) for name in GUIDED)
        raise UsageError(
            "out_of_range",
            f"{start} and {end} leave no step with guidance",
            expected=f"at least one of the {steps} steps that run between them",
            found=f"steps {first} to {last}",
            remedy=f"give others, or {field('guidance_scale')} 1 for no guidance",
        )
    if "skip_layers" in options and not any(part.skipping for part in ranges):
        start, end, scale = (field(one) for one in ("skip_start", "skip_end", "skip_scale"))
        raise UsageError(
            "no_effect",
            f"{field('guider')} skip-layer has no effect",
            expected=f"{scale} other than 0, and of the {steps} steps that run one with guidance after "
            f"{start} x {steps} and before {end} x {steps}",
            found=f"{scale} {options['skip_scale']:g}, {start} {options['skip_start']:g} and "
            f"{end} {options['skip_end']:g}",
            remedy=f"raise {end}, or leave {field('guider')} out",
        )


def _guided_by(
    options: Mapping[str, Any], artifact: Artifact, profile: Profile, guidance: bool
) -> dict[str, Any]:
    """Returns the guider and its own options, if it is another than the default one."""
    guider = GUIDERS[options["guider"] or next(iter(GUIDERS))]
    given = {name: options[name] for name in OWN_OPTIONS if options[name] is not None}
    if others := [name for name in given if name not in guider.options]:
        (own,) = (one.name for one in GUIDERS.values() if others[0] in one.options)
        raise UsageError(
            "no_effect",
            f"{field(others[0])} has no effect with {field('guider')} {guider.name}",
            remedy=f"leave it out, or pass {field('guider')} {own}",
        )
    if not guider.inputs:
        return {}
    if not guidance:
        raise UsageError(
            "no_effect",
            f"{field('guider')} {guider.name} has no effect: guidance is off",
            expected=f"{field('guidance_scale')} above 1 and a profile with guidance",
            remedy=f"raise {field('guidance_scale')}, or leave {field('guider')} out",
        )
    if guider.name not in profile.options.guiders:
        guiders = (*profile.options.guiders, guider.name)
        raise ArtifactError(
            "not_built",
            f"profile {profile.name} is not built for {field('guider')} {guider.name}",
            remedy=f"run {artifact.compiling(profile, guiders=guiders)}",
        )
    found = {"guider": guider.name, **guider.options, **given}
    if found.get("zero_steps", 0) >= options["num_steps"]:
        raise UsageError(
            "out_of_range",
            f"{field('zero_steps')} leaves no step with a velocity",
            expected=f"less than {options['num_steps']}",
            found=found["zero_steps"],
            remedy="give a smaller number",
        )
    if "skip_layers" in found:
        found["skip_layers"] = _skipped(
            found["skip_layers"] or (), artifact.manifest.skippable_layers(profile)
        )
    return found


def _skipped(given: Iterable[int], layers: int) -> list[int]:
    """Returns the layers in order; raises UsageError for none, for all, and for one that does not exist."""
    name, skipped = field("skip_layers"), sorted(set(given))
    if not skipped or skipped[-1] >= layers or len(skipped) == layers:
        raise UsageError(
            "unsupported",
            f"{name} cannot be skipped" if skipped else f"{field('guider')} skip-layer needs {name}",
            expected=f"some of the layers 0 to {layers - 1}",
            found=", ".join(map(str, skipped)) or "none",
            remedy=f"pass {name} such as {layers // 3}",
        )
    return skipped


def _avoiding(options: Mapping[str, Any], artifact: Artifact, profile: Profile) -> dict[str, Any]:
    """Returns the options of NAG, if it is on."""
    scale, *others = NAG_DEFAULTS
    if (options[scale] or 1) == 1:
        if (given := next((name for name in others if options[name] is not None), None)) is not None:
            raise UsageError(
                "no_effect",
                f"{field(given)} has no effect: {field(scale)} is off",
                remedy=f"leave it out, or pass {field(scale)} 11",
            )
        return {}
    if (model := artifact.manifest.model).chunks is not None:
        raise UsageError(
            "unsupported",
            f"{field(scale)} cannot be used with {model.variant}, which makes a video in chunks",
            remedy="leave it out",
        )
    if not profile.options.nag:
        raise ArtifactError(
            "not_built",
            f"profile {profile.name} is not built for {field(scale)}",
            remedy=f"run {artifact.compiling(profile, nag=True)}",
        )
    return {
        name: default if options[name] is None else options[name] for name, default in NAG_DEFAULTS.items()
    }
