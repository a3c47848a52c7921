"""Resolves a request against an artifact's manifest, without a weight, another of its files, or JAX."""

from __future__ import annotations

__all__ = ["resolve_request"]

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Unpack

from msgspec import structs

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.media import MediaOption
from wanrun.artifact.possible import check_possible
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import UnbuiltError
from wanrun.denoising.noise import check_seed
from wanrun.denoising.solvers import SOLVERS
from wanrun.denoising.steps import schedule
from wanrun.errors import ArtifactError, UsageError, field
from wanrun.media.inputs import Inputs, Media, check_media, is_given
from wanrun.opened.policy import LoadPolicy
from wanrun.request.adapters import Chosen
from wanrun.request.arguments import artifact_of, check_media_options, check_objects
from wanrun.request.elsewhere import ELSEWHERE, OF_PYTHON
from wanrun.request.generation import Generation
from wanrun.request.keywords import Options
from wanrun.request.lengths import MAX_WINDOWS, blended_windows, length_in_chunks, profile_of_chunks
from wanrun.request.media import given_media
from wanrun.request.options import (
    WINDOW,
    check_effects,
    clip_prompts,
    resolve_options,
    scheduled,
    with_split_steps,
    with_strength,
)
from wanrun.request.profiles import choose_profile, has_guidance
from wanrun.request.reading import as_plain, read_request
from wanrun.request.request import Request
from wanrun.request.schema import aliases
from wanrun.request.written import parse_size
from wanrun.rows import rows_of

_OF_GENERATIONS = MappingProxyType(
    {
        **ELSEWHERE,
        **OF_PYTHON,
        **{row.name: f"pass {row.name} to wanrun.load" for row in rows_of(LoadPolicy) if row.section},
    }
)
"""What to do instead of a keyword that no generation has, by its name."""


def resolve(
    artifact: str | os.PathLike[str] | Artifact,
    prompt: str,
    negative_prompt: str | None = None,
    *,
    media: Media | None = None,
    **options: Unpack[Options],
) -> Generation:
    """Checks a request, and returns what it would make and cost, without running anything.

    Only the artifact's manifest is read. Images and videos are not opened: that they are given and taken by
    the model is checked, not that they can be used. ``Pipeline.run`` makes the video of the generation.

    Args:
        artifact: the artifact's folder; or the artifact, whose manifest is not read again then.
        prompt: description of the video.
        negative_prompt: description of what the video must not show; None for the manifest's default.
        media: the images and videos that the model takes, as files or in memory.
        options: fields of ``Request`` by name, such as ``seed`` and ``num_steps``; None for the default.

    Raises:
        ArtifactError: if the manifest cannot be read, or no such profile is built.
        UsageError: for an option of another type, unknown, out of range or without effect, and for media that
            are missing or not taken.
    """
    check_objects(media)
    request = request_of({"prompt": prompt, "negative_prompt": negative_prompt, **options})
    return resolve_request(request, artifact_of(artifact), media)


def request_of(options: Mapping[str, Any]) -> Request:
    """Returns the request of keywords: fields of ``Request`` by name; None means the default.

    Raises UsageError, naming every option that is unknown or out of range, or one that cannot be a file's
    path.
    """
    given = {aliases().get(name, name): value for name, value in options.items() if value is not None}
    check_media_options(given)
    if isinstance(size := as_plain(given.get("size")), list):
        given["size"] = tuple(size)
    return read_request(given.items(), Request, instead=_OF_GENERATIONS)


def resolve_request(
    request: Request,
    artifact: Artifact,
    media: Media | None = None,
    inputs: Inputs | None = None,
    loaded: Profile | None = None,
    loop: str | None = None,
) -> Generation:
    """Returns the generation that a request asks of an artifact: the only way to make one.

    Args:
        media: images and videos, if the request names none.
        inputs: images and videos that were already read, instead of media.
        loaded: the loaded profile, which has the defaults of size, frames, videos, guidance and number of
            reference images; None if none is loaded.
        loop: the form of the denoising loop if the request names none and the profile is built with it.

    Raises:
        ArtifactError: for a profile, a form of the loop or slots for LoRAs that are not built.
        UsageError: for an option without effect, a seed or steps that are out of range, media that are
            missing, not taken, or given in two ways, and LoRAs that are missing or do not fit.
    """
    check_seed(request.seed)
    request = with_split_steps(request)
    chosen = Chosen(request.lora, artifact)
    manifest = chosen.with_defaults(request)
    request, fitted = scheduled(request, manifest)
    given, task = given_media(request, media, inputs), manifest.model.task
    check_effects(manifest, has_guidance(manifest, request.guidance_scale), request)
    if inputs is None:
        check_media(manifest, given or Media())
    count = _num_references(manifest, given, inputs)
    if count is None and loaded is None:
        count = 0
    shape = _shape(manifest, request, count)
    if any(getattr(request, name) is not None for name in WINDOW):
        check_possible(manifest.model, None, request.window_frames, "window_frames")
        shape["num_frames"] = request.window_frames
    asked = replace(artifact, manifest=manifest)
    begins = task.start is not None and _has(manifest, given or inputs, task.start)
    unguided = not has_guidance(manifest, request.guidance_scale)
    choose = partial(choose_profile, asked, loaded=loaded, unguided=unguided, begins=begins)
    alone = not task.always_encodes and not any(_has(manifest, given or inputs, one) for one in task.inputs)
    if manifest.model.chunks is not None and request.clips is None:
        profile = profile_of_chunks(manifest.model, choose, shape)
    else:
        profile = _chosen_profile(choose, request, shape, alone)
    chosen.check(profile)
    changes: dict[str, Any] = {"loop": request.loop or (loop if loop in profile.options.forms else None)}
    if task.windows is not None and (said := inputs or given) is not None:
        changes["segment_overlap"] = said.segment_overlap
    request = with_strength(asked, profile, request, begins)
    options = resolve_options(asked, profile, structs.replace(request, **changes)) | fitted
    if manifest.model.chunks is not None:
        goes_on = task.held is not None and any(  # else its frames are none of the result's
            _has(manifest, given or inputs, name) for name, one in task.inputs.items() if one.kind == "video"
        )
        options |= length_in_chunks(manifest, profile, request, goes_on)
    options |= blended_windows(manifest, profile, request)
    if {"clips", "clip_prompts", "window_frames"} & options.keys():
        _check_parts(manifest, profile, given or inputs, options)
    if chosen.loras:
        options["lora"] = [one.facts for one in chosen.loras]
    table, ranges = schedule(options, manifest)
    if inputs is not None or not task.inputs or (given is None and not task.always_encodes):
        reads = None
    else:  # with the resolved overlap, so that equal media compare equal
        reads = structs.replace(given or Media(), segment_overlap=options.get("segment_overlap"))
    guided = any(part.guided for part in ranges)
    return Generation(
        manifest=artifact.manifest,
        profile=profile,
        options=options,
        table=table,
        ranges=ranges,
        fps=float(manifest.model.defaults.fps if request.fps is None else request.fps),
        media=reads,
        loras=chosen.loras,
        warnings=(*_warnings(manifest, profile, request, options, guided), *chosen.warnings()),
    )


def _chosen_profile(
    choose: Callable[[Mapping[str, object]], Profile],
    request: Request,
    shape: Mapping[str, object],
    alone: bool,
) -> Profile:
    """Returns the profile of a shape; the error of a longer text-only video also names windows."""
    try:
        return choose(shape)
    except UnbuiltError as error:
        if alone and request.clips is None and request.window_frames is None:
            with suppress(ArtifactError):
                built = choose({**shape, "num_frames": None}).num_frames
                if built < error.lacking.num_frames <= MAX_WINDOWS * built:
                    way = f"pass {field('window_frames')} {built} for windows that are blended"
                    error.remedy = f"{way}, or {error.remedy}"
        raise


def _check_parts(
    manifest: Manifest, profile: Profile, media: Media | Inputs | None, options: Mapping[str, Any]
) -> None:
    """Raises UsageError where a clip cannot continue another one, or windows have more inputs than text."""
    task, clips = manifest.model.task, field("clips")
    given = [name for name in task.inputs if _has(manifest, media, name)]
    if (texts := len(clip_prompts(options))) >= (count := options.get("clips", 1)):
        raise UsageError(
            "out_of_range",
            f"{field('clip_prompts')} has more lines than there are clips after the first",
            expected=f"at most {count - 1}" if count > 1 else f"{clips} of 2 or more",
            found=texts,
            remedy=f"raise {clips}, or leave lines out",
        )
    if "window_frames" in options:
        windows = " and ".join(map(field, WINDOW))
        longer = "" if task.chained is None or "clips" in options else f", or pass {clips} instead"
        if task.always_encodes:
            raise UsageError(
                "no_effect",
                f"{field('num_frames')} in windows is only for models of text",
                remedy=f"leave {windows} out{longer}",
            )
        if others := [*map(field, given), *([clips] if "clips" in options else [])]:
            raise UsageError(
                "no_effect",
                f"{field('num_frames')} in windows is only for text",
                expected=f"no image, no video and no {clips}",
                found=", ".join(others),
                remedy=f"leave {' and '.join(others)} out, or {windows}{longer}",
            )
        return
    if other := next((name for name in given if task.inputs[name] is not task.chained), None):
        what = f"{clips} and {field(other)} exclude each other"
        raise UsageError("conflict", what, expected="only a first image", remedy=f"leave {field(other)} out")
    if profile.num_videos > 1:
        raise UsageError(
            "unsupported",
            f"{clips} needs a profile of one video: each has an end of its own to continue from",
            found=f"{profile.num_videos} videos in {profile.name}",
            remedy="use a profile of one video, with several seeds",
        )


def _warnings(
    manifest: Manifest, profile: Profile, request: Request, options: Mapping[str, Any], guided: bool
) -> Iterator[str]:
    """Yields what a request may not expect: guidance that is off, and what has no effect."""
    shape = {**profile.shape, "guidance": True}
    built = any(other.shape == shape for other in manifest.profiles.values())
    if request.guidance_scale is None and has_guidance(manifest) and not profile.guidance and not built:
        yield "no profile is built with guidance, so guidance is off; a guidance scale of 1 asks for that"
    if request.negative_prompt and not guided and "nag_scale" not in options:
        yield "the negative prompt has no effect: guidance is off"
    own, shift = manifest.model.defaults, options["flow_shift"]
    if own.timesteps is not None and "timesteps" not in options:
        timesteps = ", ".join(f"{one:g}" for one in own.timesteps)
        yield (
            f"the default timesteps {timesteps} are not used: they are for {own.num_steps} {own.solver} "
            f"steps at shift {own.flow_shift:g}; the steps are those of {options['solver']}'s own grid"
        )
    given = request.timesteps is not None and shift != own.flow_shift
    if given and "strength" not in options and not SOLVERS[options["solver"]].trained_levels:
        yield f"the shift {shift:g} has no effect: the timesteps are given"


def _shape(manifest: Manifest, request: Request, num_references: int | None) -> dict[str, object]:
    """Returns the shape that a request asks for."""
    # A named profile is with or without guidance; whether the scale suits it, `resolve_options` checks. One
    # with guidance makes videos without it as well.
    scale = None if request.profile is not None else request.guidance_scale
    guided = scale is not None and has_guidance(manifest, scale)
    return {
        "profile": request.profile,
        "size": None if request.size is None else parse_size(request.size),
        "num_frames": request.num_frames,
        "num_videos": request.num_videos,
        "num_references": num_references,
        "guidance": True if guided else None,
    }


def _has(manifest: Manifest, media: Media | Inputs | None, name: MediaOption) -> bool:
    """Whether an image or a video that the model takes is given."""
    if isinstance(media, Inputs):
        return manifest.model.task.inputs[name].array in media.arrays
    return media is not None and is_given(media, name)


def _num_references(manifest: Manifest, media: Media | None, inputs: Inputs | None) -> int | None:
    """Returns the number of reference images; None for a model without them, and if no media are given."""
    counted = manifest.model.task.counted
    if counted is None or (media is None and inputs is None):
        return None
    name, item = counted
    return len(getattr(media, name) if inputs is None else inputs.arrays.get(item.array, ()))
