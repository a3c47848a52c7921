"""Calibrates an artifact: chooses few steps by converged runs, or judges another's, and records schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from wanbuild.calibrate.calibrate_options import CalibrateRequest
from wanbuild.calibrate.curve import AXIS, FILE, draw, of_schedules
from wanbuild.calibrate.fit import Steps
from wanbuild.calibrate.memo import Memo
from wanbuild.calibrate.prompt_sets import PromptSets, prompt_of, read_prompts
from wanbuild.calibrate.runs import Runs, check_calibratable, made_for
from wanbuild.calibrate.search import BEST, FIRST, FIT, POWERS, Found, judged, search
from wanbuild.check.embed import runnable_profiles
from wanbuild.staging import changing
from wanbuild.targets.topology import open_exactly
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.mesh import num_devices
from wanrun.artifact.programs import Profile
from wanrun.artifact.roles import STEPWISE
from wanrun.artifact.schedules import Schedule
from wanrun.artifact.select import named_profile, select_target
from wanrun.errors import ArtifactError, UsageError
from wanrun.files import digest_found, replace_file
from wanrun.generation.load import load
from wanrun.request.prompts_file import Entry
from wanrun.timing.clock import now
from wanrun.units import in_minutes

Report = Callable[[str], None]

MAX_MEDIA_BYTES = 2**32
"""The largest image or video whose change is noticed by its content."""

SHARES = (1 / 2, 1 / 3, 1 / 5, 2 / 15)
"""Of the published steps: the numbers of steps that are chosen for where none are given."""


def calibrate(request: CalibrateRequest, report: Report, warn: Report) -> Manifest:
    """Chooses schedules, or takes another artifact's, and writes them with their figures into the manifest.

    What an interrupted calibration has measured is kept in the user's cache, and taken by the next one with
    the same request. The same request gives the same schedules, unless ``minutes`` has ended it. ``report``
    gets lines about the work and the results, ``warn`` gets one if few prompts judge. Returns the artifact's
    new manifest.

    Raises UsageError for prompts that cannot be used, a model whose steps cannot be chosen, and an artifact
    that cannot be written, or that is rebuilt meanwhile; ArtifactError if no profile with the step form of
    the loop can run here.
    """
    prompts = read_prompts(request.prompts)
    for doubt in prompts.doubts():
        warn(doubt)
    # An artifact that cannot be written is reported before hours of work.
    with changing(request.artifact.resolve()) as artifact:
        if artifact.manifest.model.chunks is not None:
            raise UsageError(
                "unsupported",
                f"{artifact.manifest.model.variant} makes a video in chunks, and is not calibrated",
                remedy="choose its steps by --steps of wanrun",
            )
        profile = _profile(artifact, request.profile)
    taken = None if request.source is None else taken_steps(artifact.manifest, request.source)
    selected = select_target(artifact, profile)
    memo = Memo(_facts(request, artifact.manifest, profile, selected.name, prompts))
    open_exactly(selected.target.environment["platform"], num_devices(selected.mesh))
    with load(artifact, profile=profile.name, loop=STEPWISE) as pipeline:
        runs = Runs(pipeline, memo, request.reference_steps)
        own = runs.resolved(prompts.chosen_by[0])
        check_calibratable(own)
        published = len(own.table.timesteps)
        if taken is None:
            most = min(published, request.reference_steps) - 1
            each = 2 if own.options["guidance_scale"] > 1 else 1
            counts = _counts(request.evaluations or (), published, most, each)
            found = _searched(request, runs, prompts, counts, published, report)
        else:
            found = _judged(request, runs, prompts, taken, published, report)
    schedules = {
        name: made_for(own, one.steps, _measured(one, request, profile, prompts, published))
        for name, one in found.items()
        # Where steps of another artifact are not nearer, those that this one has of the name stay.
        if taken is None or one.better or name not in artifact.manifest.schedules
    }
    changed = _written(artifact, schedules)
    memo.forget()
    if schedules:
        _drawn(changed, report)
    return changed.manifest


def _drawn(artifact: Artifact, report: Report) -> None:
    """Draws the curve of the artifact's schedules, where matplotlib is installed."""
    try:
        manifest = artifact.manifest
        picture = draw({manifest.model.variant: of_schedules(manifest.schedules)}, AXIS)
    except UsageError as error:
        report(f"no picture: {error}")
        return
    replace_file(artifact.folder / FILE, picture)
    report(f"{artifact.folder / FILE} shows quality over evaluations")


def _written(before: Artifact, schedules: Mapping[str, Schedule]) -> Artifact:
    """Adds schedules to the manifest; raises UsageError if the artifact is another one by now."""
    with changing(before.folder) as artifact:
        if artifact.manifest.content_digest != before.manifest.content_digest:
            raise UsageError(
                "changed",
                f"{artifact} has changed meanwhile",
                expected=before.manifest.content_digest,
                found=artifact.manifest.content_digest,
                remedy="calibrate it again",
            )
        artifact = artifact.changed(schedules={**artifact.manifest.schedules, **schedules})
        artifact.write()
    return artifact


def _searched(
    request: CalibrateRequest,
    runs: Runs,
    prompts: PromptSets,
    counts: Sequence[int],
    published: int,
    report: Report,
) -> dict[str, Found]:
    """Searches each number of steps, reports the expected time and the results, and returns them by name."""
    began = now()
    few, judging = len(prompts.chosen_by), len(prompts.decided_by) + len(prompts.reported_by)
    report(f"{few} runs to choose by, {judging} to judge by, compared with {request.reference_steps} steps")
    runs.recorded(prompts.chosen_by[:1])
    seconds = (now() - began) / request.reference_steps
    fits = len(POWERS) + 1
    each = fits * min(FIT, few) + (fits + 1) * min(FIRST, few) + BEST * few
    steps = (few - 1) * request.reference_steps + each * sum(counts)
    steps += _judging_steps(request, prompts, counts, published)
    report(f"about {in_minutes(seconds * steps)} for {', '.join(map(str, counts))} steps")
    recording = runs.recorded(prompts.chosen_by)
    names = {f"{count}-steps": count for count in counts}

    def find(name: str) -> Found:
        return search(runs, recording, prompts, names[name], published)

    return _found(request, began, names, find, report)


def _judged(
    request: CalibrateRequest,
    runs: Runs,
    prompts: PromptSets,
    taken: Mapping[str, Steps],
    published: int,
    report: Report,
) -> dict[str, Found]:
    """Judges steps that were chosen elsewhere, as ``_searched`` does those that it finds."""
    began, first = now(), prompts.decided_by[0]
    names = {name: len(one.timesteps) for name, one in taken.items()}
    judging = len(prompts.decided_by) + len(prompts.reported_by)
    report(f"{judging} runs to judge by, compared with {request.reference_steps} steps")
    runs.reference(first)
    seconds = (now() - began) / request.reference_steps
    steps = _judging_steps(request, prompts, names.values(), published) - request.reference_steps
    report(f"about {in_minutes(seconds * steps)} for {', '.join(map(str, names.values()))} steps")

    def find(name: str) -> Found:
        plain = runs.plain(first, names[name])
        return judged(runs, prompts, plain, taken[name], "taken from another artifact", published)

    return _found(request, began, names, find, report)


def _judging_steps(
    request: CalibrateRequest, prompts: PromptSets, counts: Collection[int], published: int
) -> int:
    """Returns the steps of judging: converged runs, published ones, and two of each number of steps."""
    decided, reported = len(prompts.decided_by), len(prompts.reported_by)
    each = request.reference_steps + 2 * sum(counts)
    return (decided + reported) * each + reported * published


def _found(
    request: CalibrateRequest,
    began: float,
    names: Mapping[str, int],
    find: Callable[[str], Found],
    report: Report,
) -> dict[str, Found]:
    """Finds the steps of each name while there is time; reports their quality on the reporting prompts."""
    found = dict[str, Found]()
    for name, count in names.items():
        if request.minutes is not None and now() - began > 60 * request.minutes:
            report(f"{count} steps: left out, {request.minutes:g} minutes are over")
            continue
        found[name] = one = find(name)
        figures = f"{one.chosen} dB from converged, the solver's own {one.plain}"
        report(f"{count} steps: {figures}; {one.verdict}")
    return found


def _profile(artifact: Artifact, name: str | None) -> Profile:
    reasons: list[str] = []
    profiles = runnable_profiles(artifact, reasons.append)
    if name is not None:
        profiles = [one for one in profiles if one == named_profile(artifact, name)]
    fitting = [one for one in profiles if STEPWISE in one.options.forms]
    if not fitting:
        raise ArtifactError(
            "not_built",
            f"no profile of {artifact} can be calibrated here",
            expected="one with the step form of the loop, and executables for this machine",
            found="; ".join(reasons) or None,
            remedy="run wanbuild compile first",
        )
    return fitting[0]


def _counts(evaluations: Sequence[int], published: int, most: int, each: int) -> list[int]:
    """Returns the numbers of steps, the most first, each once."""
    for one in evaluations:
        if one < 2 * each or one // each > most:
            raise UsageError(
                "out_of_range",
                "--evaluations are out of range",
                expected=f"{2 * each} to {each * most}, {each} for each step",
                found=one,
            )
    counts = [one // each for one in evaluations] or [round(share * published) for share in SHARES]
    return sorted({min(most, max(2, count)) for count in counts}, reverse=True)


def _measured(
    one: Found, request: CalibrateRequest, profile: Profile, prompts: PromptSets, published: int
) -> dict[str, float | int | str]:
    """Returns the figures that the manifest keeps: dB of PSNR, with intervals of 90 % of several prompts."""
    values = {
        "decided": one.decided,
        "psnr": one.chosen,
        "plain_psnr": one.plain,
        "gain": one.gain,
        "psnr_published": one.published,
        "plain_psnr_published": one.plain_published,
        "published_psnr": one.between,
    }
    measured: dict[str, float | int | str] = {}
    for name, mean in values.items():
        ends = {name: mean.value, f"{name}_low": mean.low, f"{name}_high": mean.high}
        measured |= {key: round(value, 2) for key, value in ends.items() if math.isfinite(value)}
    return {
        **measured,
        "how": one.how,
        "decided_by": len(set(map(prompt_of, prompts.decided_by))),
        "reported_by": len(set(map(prompt_of, prompts.reported_by))),
        "converged_steps": request.reference_steps,
        "published_steps": published,
        "profile": profile.name,
        "dtype": profile.options.dtype,
    }


def _facts(
    request: CalibrateRequest, manifest: Manifest, profile: Profile, target: str, prompts: PromptSets
) -> dict[str, Any]:
    """Returns what decides the figures of a calibration's runs."""
    lines = prompts.lines()
    return {
        "content": manifest.content_digest,
        "profile": profile.name,
        "target": target,
        "steps": request.reference_steps,
        "prompts": msgspec.to_builtins(lines),
        "files": [
            digest_found(path, MAX_MEDIA_BYTES) for line in lines for _, path in Entry(line).media_files
        ],
    }


def taken_steps(manifest: Manifest, source: Path) -> dict[str, Steps]:
    """Returns the steps of another artifact's schedules by name, the most first.

    They can only hold where solver, shift, guidance and boundary are the same, and may not even hold there.
    ``manifest`` is that of the artifact that they are for. Raises UsageError if the other has no schedules,
    or was made for another solver, shift, guidance or boundary.
    """
    given = read_manifest(source)
    if not given.schedules:
        raise UsageError("not_built", f"{source} has no schedules", remedy="calibrate it first")
    if others := list(_others(given, manifest)):
        raise UsageError(
            "mismatch",
            f"the schedules of {source} are for another model",
            expected=", ".join(f"{name} {own}" for name, own, _ in others),
            found=", ".join(f"{name} {other}" for name, _, other in others),
        )
    schedules = sorted(given.schedules.items(), key=lambda one: -len(one[1].timesteps))
    return {name: Steps(one.timesteps, one.coefficients) for name, one in schedules}


def _others(given: Manifest, manifest: Manifest) -> Iterator[tuple[str, Any, Any]]:
    """Yields each default that matters to a schedule and differs: its name, this model's, the other's."""
    ours, theirs = manifest.model.default_options(), given.model.default_options()
    for name in ("solver", "flow_shift", "guidance_scale", "guidance_scale_2", "boundary"):
        if ours.get(name) != theirs.get(name):
            yield name, ours.get(name), theirs.get(name)
