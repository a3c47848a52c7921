"""The options of one generation: what a schedule decides, defaults of the manifest, checks against both."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import structs

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import TINY_VAE, Manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.roles import DECODERS, FORMS, STEPWISE
from wanrun.artifact.schedules import Schedule
from wanrun.denoising.boundary import boundary_after, split_at
from wanrun.denoising.guided_steps import GUIDED
from wanrun.denoising.steps import explicit_timesteps, schedule
from wanrun.errors import ArtifactError, UsageError, field, shortened
from wanrun.files import read_bounded
from wanrun.media.inputs import MEDIA_KINDS
from wanrun.request.guidance import check_guidance, check_guided_steps, guided_options
from wanrun.request.offered import offered
from wanrun.request.request import STRENGTH, TWO_EXPERTS, Request
from wanrun.request.schema import rows
from wanrun.rows import Row

WINDOW = ("window_frames", "window_overlap")
"""The options of windows that are blended, which are recorded where there are several."""

_NOT_RECORDED = frozenset(
    {*MEDIA_KINDS, "mode", "fit", "profile", "schedule", "lora", "size", "num_frames", "num_videos", "fps"}
    | set(WINDOW)
)
"""Options that ``resolve_options`` leaves out: media and LoRAs, of which the metadata has digests, the
profile's shape, and the file's fps."""


MAX_SCHEDULE_BYTES = 2**20
"""The largest file of a schedule."""

SPLIT = ("steps_high", "steps_low")
"""The options by which a request says the steps of each expert."""

_UNSAID = MappingProxyType({"clips": 1, "clip_prompts": "", "decoder": "full", "strength": None})
"""Values that a generation's options leave out, as of artifacts without the option."""

_MADE_FOR = ("guidance_scale", "guidance_scale_2", "boundary")


def scheduled(request: Request, manifest: Manifest) -> tuple[Request, dict[str, Any]]:
    """Returns a request with the options of its schedule, if it names one, and the fitted coefficients.

    Raises UsageError if there is no such schedule, or it does not fit the model or the request.
    """
    if request.schedule is None:
        return request, {}
    chosen, name = _schedule_of(request.schedule, manifest), field("schedule")
    decided = {
        "num_steps": len(chosen.timesteps),
        "solver": chosen.solver,
        "timesteps": chosen.timesteps,
        "flow_shift": manifest.model.defaults.flow_shift,
    }
    for option, value in decided.items():
        if getattr(request, option) not in (None, value):
            raise UsageError(
                "conflict",
                f"{name} and {field(option)} contradict each other",
                remedy=f"leave {field(option)} out",
            )
    if (wrong := next(_misfits(chosen, request, manifest), None)) is not None:
        fitting = [
            key for key, one in manifest.schedules.items() if not any(_misfits(one, request, manifest))
        ]
        raise UsageError(
            "mismatch",
            f"{name} {shortened(request.schedule)} is for another request: {wrong}",
            expected="one of " + ", ".join(fitting) if fitting else None,
            remedy=None if fitting else f"leave {name} out, or run wanbuild calibrate",
        )
    made_for = {option: getattr(chosen, option) for option in _MADE_FOR}
    fitted = {} if chosen.coefficients is None else {"coefficients": chosen.coefficients}
    return structs.replace(request, solver=chosen.solver, timesteps=chosen.timesteps, **made_for), fitted


def _misfits(chosen: Schedule, request: Request, manifest: Manifest) -> Iterator[str]:
    """Yields each setting that differs from what a schedule was made for."""
    if ("boundary" in manifest.model.options) != (chosen.boundary is not None):
        yield f"it was made for {'one transformer' if chosen.boundary is None else 'two experts'}"
        return
    for option in _MADE_FOR:
        given, made_for = getattr(request, option), getattr(chosen, option)
        if given not in (None, made_for):
            if made_for is None:
                yield f"it was made without {field(option)}"
            else:
                yield f"it was made for {field(option)} {made_for:g}, not {given:g}"
    for option, default in {**GUIDED, "guider": "cfg"}.items():
        if getattr(request, option) not in (None, default):
            yield f"it was made without {field(option)}"


def _schedule_of(name: str, manifest: Manifest) -> Schedule:
    if (found := manifest.schedules.get(name)) is not None:
        return found
    what = f"there is no schedule {shortened(name)}"
    if not name.endswith(".json"):
        names = ", ".join(manifest.schedules) or (
            "no schedules; wanbuild calibrate makes some, and wanbuild convert --sampling gives a "
            "distilled model its own"
        )
        raise UsageError("unknown_name", what, expected="a .json file, or one of the artifact's: " + names)
    try:
        data = read_bounded(Path(name), MAX_SCHEDULE_BYTES).removeprefix(b"\xef\xbb\xbf")  # a byte order mark
        return msgspec.json.decode(data, type=Schedule)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            "unreadable", f"the schedule {shortened(name)} cannot be read", found=error
        ) from None


def with_split_steps(request: Request) -> Request:
    """Returns a request with the number of steps that its experts' steps add up to.

    Raises UsageError for the steps of only one expert, or another number of steps.
    """
    given = {field(name): getattr(request, name) for name in SPLIT}
    if all(one is None for one in given.values()):
        return request
    if None in given.values():
        (lacking,) = (name for name, one in given.items() if one is None)
        raise UsageError(
            "conflict",
            f"{' and '.join(given)} belong together",
            found=f"no {lacking}",
            remedy=f"pass {lacking} too",
        )
    total = sum(given.values())
    if request.num_steps not in (None, total):
        raise UsageError(
            "conflict",
            f"{field('num_steps')} contradicts {' and '.join(given)}",
            expected=f"{total}, their sum",
            found=request.num_steps,
            remedy=f"leave {field('num_steps')} out",
        )
    return structs.replace(request, num_steps=total)


def _boundary(options: Mapping[str, Any], given: float | None, manifest: Manifest) -> float:
    """Returns the boundary that gives the experts their steps; UsageError if the given one does not."""
    options = {**options, "strength": None}  # they are of all steps
    high, names = options["steps_high"], " and ".join(map(field, SPLIT))
    if given is None:
        return boundary_after(high, options, manifest)
    if (found := split_at(given, options, manifest)) != high:
        raise UsageError(
            "conflict",
            f"{field('boundary')} contradicts {names}",
            expected=f"{high} steps at or above it",
            found=f"{found} at or above {given:g}",
            remedy=f"leave {field('boundary')} out",
        )
    return given


def check_effects(manifest: Manifest, guidance: bool, request: Request) -> None:
    """Refuses options that would have no effect; ``guidance_scale_2`` does not decide whether guidance is on.

    Raises UsageError for an option of two experts with a single transformer, an option of other models, or
    without guidance a ``guidance_scale_2`` above 1 or a share of the steps that have guidance.
    """
    for row in _absent(manifest):
        if getattr(request, row.name) is not None:
            expert = row.models == TWO_EXPERTS
            why = "this model has one transformer" if expert else f"this is no {row.models} model"
            models = f"models with {row.models}" if expert else f"{row.models} models"
            raise UsageError(
                "no_effect",
                f"{field(row.name)} has no effect: {why}",
                remedy=f"leave it out; it is for {models}",
            )
    scale, first = request.guidance_scale_2, field("guidance_scale")
    if not guidance and (name := next((one for one in GUIDED if getattr(request, one) is not None), None)):
        raise UsageError(
            "no_effect",
            f"{field(name)} has no effect: guidance is off",
            expected=f"{first} above 1 and a profile with guidance",
            remedy=f"raise {first}, or leave {field(name)} out",
        )
    if scale is not None and scale > 1 and not guidance:
        raise UsageError(
            "no_effect",
            f"{field('guidance_scale_2')} has no effect: guidance is off",
            expected=f"{first} above 1 and a profile with guidance, for both experts",
            found=scale,
            remedy=f"raise {first}, or leave the other out",
        )


def check_decoder(artifact: Artifact, decoder: str | None) -> None:
    """Raises UsageError for a decoder that does not exist, or that the artifact lacks."""
    name = field("decoder")
    if decoder not in (None, *DECODERS):
        raise UsageError(
            "unsupported", f"{name} cannot be {decoder!r}", expected="one of " + ", ".join(DECODERS)
        )
    if decoder == "tiny" and TINY_VAE not in artifact.manifest.components:
        source = artifact.manifest.source.get("repository") or "SOURCE"
        raise UsageError(
            "not_built",
            f"{name} tiny needs a tiny decoder, and this artifact has none",
            remedy=f"leave it out, or run wanbuild convert {source} --tiny-vae FILE --force --artifact "
            f"{shlex.quote(str(artifact))}, and compile it again (docs/tiny-decoder.md)",
        )


def with_strength(artifact: Artifact, profile: Profile, request: Request, begins: bool) -> Request:
    """Returns a request with the strength of a video that its steps begin with, if one is given (``begins``).

    Raises UsageError for a strength without a video; ArtifactError if the profile is not built for such a
    video.
    """
    name, manifest = field("strength"), artifact.manifest
    start = manifest.model.task.start
    if not begins:
        if request.strength is None:
            return request
        video = "a video to begin with" if start is None else field(start)
        raise UsageError(
            "no_effect",
            f"{name} has no effect without {video}",
            expected=None if start else "a profile of wanbuild compile --video-to-video",
            remedy="leave it out" if start is None else f"pass {video} too",
        )
    if not profile.options.video_to_video:
        built = [key for key, one in manifest.profiles.items() if one.options.video_to_video]
        choose = "choose one of these, or " if built else ""
        raise ArtifactError(
            "not_built",
            f"profile {profile.name} is not built for a video to begin with",
            expected="one of " + ", ".join(built) if built else None,
            remedy=f"{choose}run {artifact.compiling(profile, video_to_video=True)}",
        )
    return structs.replace(request, strength=STRENGTH if request.strength is None else request.strength)


def clip_prompts(options: Mapping[str, Any]) -> list[str]:
    """Returns the prompts of a generation's clips after the first; the last one holds for the rest."""
    return [line.strip() for line in options.get("clip_prompts", "").splitlines() if line.strip()]


def _absent(manifest: Manifest) -> tuple[Row, ...]:
    """Returns the options that only other models have."""
    told_elsewhere = _NOT_RECORDED | {"strength"}
    return tuple(
        row for row in rows() if row.models and row.name not in told_elsewhere and not offered(row, manifest)
    )


def _own_options(manifest: Manifest) -> tuple[str, ...]:
    """Returns the names of this model's options that ``resolve_options`` resolves."""
    absent = _absent(manifest)
    return tuple(row.name for row in rows() if row.name not in _NOT_RECORDED and row not in absent)


def resolve_loop(artifact: Artifact, profile: Profile, loop: str | None) -> str:
    """Returns the form of the denoising loop to run: the given one, or for None the preferred one.

    Raises UsageError if there is no such form; ArtifactError if the profile is not built with it, naming the
    built forms.
    """
    name, built = field("loop"), profile.options.forms
    if loop is not None and loop not in FORMS:
        raise UsageError("unsupported", f"{name} cannot be {loop!r}", expected="one of " + ", ".join(FORMS))
    form = loop or built[0]
    if form not in built:
        raise ArtifactError(
            "not_built",
            f"profile {profile.name} has no program for {name} {form}",
            found=f"one for {' and '.join(built)}",
            remedy="add it with "
            + artifact.compiling(profile, f"--loop {'all' if FORMS[form].streams else 'both'}"),
        )
    return form


def _check_max_steps(artifact: Artifact, profile: Profile, loop: str, num_steps: int) -> None:
    """Raises UsageError if the scan form is to run more steps than its table holds."""
    if FORMS[loop].looped and num_steps > profile.options.max_steps:
        other = f" {field('loop')} {STEPWISE}," if STEPWISE in profile.options.forms else ""
        more = f"--loop {profile.options.loop} --max-steps {num_steps}"
        raise UsageError(
            "out_of_range",
            f"the number of steps is too large for the scan form of profile {profile.name}",
            expected=f"at most {profile.options.max_steps}",
            found=num_steps,
            remedy=f"use fewer steps,{other} or {artifact.compiling(profile, more)}",
        )


def resolve_options(artifact: Artifact, profile: Profile, request: Request) -> dict[str, Any]:
    """Fills in the manifest's defaults: returns the options of a generation, which the metadata records.

    The artifact has the defaults that LoRAs bring. Where the profile has no guidance, or the scale turns it
    off, both scales are 1, and there is no negative prompt but for NAG. The default of ``guidance_scale_2``
    is the given ``guidance_scale``; if neither is given, both are the manifest's. ``explicit_timesteps``
    decides when the default timesteps are used.

    Returns the options of this model, with width, height and num_frames. Explicit timesteps are in
    ``timesteps``, and ``num_steps`` is then their number. The shares in ``GUIDED`` are there unless they are
    all steps, and ``NAG_DEFAULTS``' options where NAG is on.

    Raises UsageError for an option that would have no effect, a guidance scale that is of another profile, no
    step with guidance, or more steps than the scan form is built for; ArtifactError for a form of the loop
    that is not built.
    """
    manifest = artifact.manifest
    defaults = manifest.model.default_options()
    if request.guidance_scale is not None:
        defaults["guidance_scale_2"] = request.guidance_scale
    scale = defaults["guidance_scale"] if request.guidance_scale is None else request.guidance_scale
    guidance = profile.guidance and scale > 1
    check_effects(manifest, guidance, request)
    check_decoder(artifact, request.decoder)
    check_guidance(profile, request.guidance_scale)
    given = {name: getattr(request, name) for name in _own_options(manifest)}
    options: dict[str, Any] = {
        name: defaults.get(name) if value is None else value for name, value in given.items()
    }
    options.pop("timesteps")
    if (timesteps := explicit_timesteps(defaults, given)) is not None:
        options |= {"timesteps": timesteps, "num_steps": len(timesteps)}
    floats = {row.name for row in rows() if row.base is float and not row.numbers} & options.keys()
    options |= {name: float(options[name]) for name in floats if options[name] is not None}
    options |= {"width": profile.width, "height": profile.height, "num_frames": profile.num_frames}
    options = guided_options(options, artifact, profile, guidance)
    if options.get("steps_high") is None:
        options = {name: value for name, value in options.items() if name not in SPLIT}
    else:
        options["boundary"] = _boundary(options, request.boundary, manifest)
    for name, usual in _UNSAID.items():
        if options.get(name) in (None, usual):
            options.pop(name, None)
    options["loop"] = resolve_loop(artifact, profile, request.loop)
    table, ranges = schedule(options, manifest)  # of a video to begin with without the first steps
    _check_max_steps(artifact, profile, options["loop"], len(table.timesteps))
    check_guided_steps(options, ranges)
    return options
