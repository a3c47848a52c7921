"""The lengths that a video can have: frames of so many seconds, and any number for a model of chunks."""

from __future__ import annotations

__all__ = ["check_live", "check_start", "length_of", "live_chunks"]

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.model import Model
from wanrun.artifact.possible import check_possible
from wanrun.artifact.programs import Profile
from wanrun.denoising.latents import latent_frames
from wanrun.errors import ArtifactError, UsageError, field, wrong_type
from wanrun.request.request import Request

if TYPE_CHECKING:
    import numpy as np

    from wanrun.request.generation import Generation

MOST_PROFILES: Final = 100
"""How often the frames of its profile a video that is not live has at most: its latents are in memory."""


def nearest_length(model: Model, frames: float) -> int:
    """Returns the number of frames that a model makes which is nearest; of two, the larger."""
    each = model.vae_temporal
    return 1 + each * max(math.floor((frames - 1) / each + 0.5), 0)


def length_of(model: Model, seconds: float, fps: float) -> int:
    """Returns the number of frames that a model makes which is nearest to so many seconds.

    Args:
        model: the model.
        seconds: of the video.
        fps: frames per second.
    """
    return nearest_length(model, seconds * fps)


def check_live(
    manifest: Manifest, frames: int | None, name: str = "max_frames", decoder: str | None = None
) -> None:
    """Checks that a model's video can be live.

    Args:
        manifest: of the model.
        frames: of the video; None for no end.
        name: of the option that says how many.
        decoder: that makes the frames; None for the VAE's.

    Raises:
        UsageError: for a model that makes a video at once, for a decoder of whole videos, and for frames that
            are no whole latent frames.
    """
    if manifest.model.chunks is None:
        raise UsageError(
            "unsupported",
            f"{manifest.model.variant} makes a video at once, so it cannot be live",
            expected="a model that makes videos chunk by chunk",
            remedy="make it as an ordinary one",
        )
    if decoder not in (None, "full"):
        raise UsageError(
            "unsupported",
            f"{field('decoder')} {decoder} decodes whole videos, so it cannot decode a live one",
            remedy=f"leave {field('decoder')} out",
        )
    if frames is not None and (isinstance(frames, bool) or not isinstance(frames, Integral)):
        raise wrong_type(field(name), "a whole number, or None", frames)
    if frames is not None and frames != (nearest := max(nearest_length(manifest.model, frames), 1)):
        raise UsageError(
            "out_of_range",
            f"{field(name)} of a live video cannot be {frames}",
            expected=f"one more than a multiple of {manifest.model.vae_temporal}",
            remedy=f"use {nearest}",
        )


def live_chunks(generation: Generation, frames: int | None) -> Iterable[int]:
    """Returns the latent frames of each chunk of a live video.

    Args:
        generation: of its profile.
        frames: of the video; None for no end.
    """
    model, window = generation.manifest.model, generation.profile.num_frames
    assert model.chunks is not None  # ``check_live`` refuses other models
    if frames is None:
        return itertools.chain([model.chunks.first], itertools.repeat(model.chunks.each))
    return model.chunks.lengths(model.latent_frames(frames), model.latent_frames(window))


def check_start(generation: Generation, frames: int | None, latents: np.ndarray) -> None:
    """Checks the initial latents of a live video's first chunks.

    Args:
        generation: what is made.
        frames: of the video; None for no end.
        latents: float32 (1, C, T, h, w), of as many chunks as they have frames.

    Raises:
        UsageError: for latents of another shape or dtype, that are not finite, or that end inside a chunk.
    """
    from wanrun.denoising.latents import check_latents  # imports NumPy

    batch, channels, _, *cells = generation.latents_shape
    given, ends = (
        latents.shape[2] if latents.ndim == 5 else 1,
        itertools.accumulate(live_chunks(generation, frames)),
    )
    check_latents(latents, (batch, channels, given, *cells))
    before = 0
    for end in ends:
        if end >= given:
            break
        before = end
    if given != end:
        nearest = [one for one in (before, end) if one]
        raise UsageError(
            "invalid_value",
            "the initial latents do not end where a chunk ends",
            expected=f"{' or '.join(map(str, dict.fromkeys(nearest)))} latent frames",
            found=given,
        )


def profile_of_chunks(
    model: Model, choose: Callable[[Mapping[str, object]], Profile], shape: Mapping[str, Any]
) -> Profile:
    """Returns the profile that makes a video chunk by chunk: one of its length, or else of any.

    ``choose`` returns the built profile of a shape; ``shape`` is what is asked for, by the names of
    ``Profile.shape``. Raises UsageError for frames that cannot be, and what ``choose`` raises.
    """
    check_possible(model, None, shape["num_frames"])
    any_length = {**shape, "num_frames": None}
    if shape["profile"] is not None:
        return choose(any_length)
    try:
        return choose(shape)
    except ArtifactError:
        with suppress(ArtifactError):
            return choose(any_length)
        raise


def length_in_chunks(manifest: Manifest, profile: Profile, request: Request, goes_on: bool) -> dict[str, int]:
    """Returns ``num_frames`` of a video that is made chunk by chunk, where they are not the profile's.

    ``goes_on`` says that it continues a given video. Raises UsageError for frames that cannot be, or that
    only another profile makes.
    """
    frames, built, name = request.num_frames, profile.num_frames, field("num_frames")
    for option in ("window_frames", "window_overlap"):
        if getattr(request, option) is not None:
            raise UsageError(
                "no_effect",
                f"{field(option)} has no effect: {manifest.model.variant} makes a video chunk by chunk",
                remedy=f"leave it out, and pass {name} alone",
            )
    if frames in (None, built) or request.clips is not None:
        return {}
    if frames > (most := MOST_PROFILES * built):
        raise UsageError(
            "out_of_range", f"{name} is too long for one run", expected=f"at most {most}", found=frames
        )
    if request.decoder not in (None, "full"):
        raise UsageError(
            "invalid_value",
            f"{field('decoder')} {request.decoder} decodes only {built} frames",
            remedy="leave one of them out",
        )
    if goes_on and frames < built:
        raise UsageError(
            "unsupported",
            f"{name} of a video that is continued cannot be {frames}",
            expected=f"{built} or more",
            remedy="give more, or no video",
        )
    return {"num_frames": frames}


MAX_WINDOWS: Final = 100
"""The most windows without overlap: the latents of all are in memory."""


def blended_windows(manifest: Manifest, profile: Profile, request: Request) -> dict[str, int]:
    """Returns a video's ``num_frames``, ``window_frames`` and ``window_overlap``; nothing for one window.

    A window has the profile's frames; the request asks for the frames of the video, and for windows. Raises
    UsageError for frames that windows cannot make, and for an overlap that they cannot have.
    """
    asked = request.window_frames is not None or request.window_overlap is not None
    temporal, length, total = manifest.model.vae_temporal, profile.num_frames, request.num_frames
    if not asked or total in (None, length):
        if request.window_overlap is not None:
            raise UsageError(
                "no_effect",
                f"{field('window_overlap')} has no effect: the video has one window of {length} frames",
                remedy=f"leave it out, or ask for more {field('num_frames')}",
            )
        return {}
    assert total is not None
    if not length <= total <= MAX_WINDOWS * length or (total - 1) % temporal:
        raise UsageError(
            "unsupported",
            f"{field('num_frames')} cannot be made in windows of {length}",
            expected=f"a multiple of {temporal} more, and no more than {MAX_WINDOWS * length}",
            found=total,
            remedy="give another number",
        )
    latents = latent_frames(manifest, length)
    overlap = -(-latents // 4) * temporal if request.window_overlap is None else request.window_overlap
    if overlap % temporal or not 0 < overlap // temporal < latents:
        most = (latents - 1) * temporal
        raise UsageError(
            "out_of_range",
            f"windows of {length} frames cannot share {overlap}",
            expected=f"a multiple of {temporal}, at most {most}"
            if most
            else "a window of several latent frames",
            remedy=f"give another {field('window_overlap')}, or a larger profile",
        )
    return {"num_frames": total, "window_frames": length, "window_overlap": overlap}
