"""The lengths that a video can have: frames of so many seconds, and those of a live video."""

from __future__ import annotations

__all__ = ["check_live", "length_of"]

import math
from numbers import Integral

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.model import Model
from wanrun.errors import UsageError, field, wrong_type


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
