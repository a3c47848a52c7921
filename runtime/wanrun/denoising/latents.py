"""The latents of a profile: their shape, the frames in front of the video's own, and given initial ones."""

from __future__ import annotations

__all__ = ["check_latents", "latents_shape"]

import numpy as np

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.errors import UsageError


def latent_frames(manifest: Manifest, num_frames: int) -> int:
    """Returns the number of latent frames of ``num_frames`` frames."""
    return manifest.model.latent_frames(num_frames)


def leading_latents(manifest: Manifest, profile: Profile) -> int:
    """Returns the latent frames in front of the video's own: the model's, and one per reference image."""
    return manifest.model.leading_latents + profile.num_references


def latents_shape(
    manifest: Manifest, profile: Profile, num_frames: int | None = None
) -> tuple[int, int, int, int, int]:
    """Returns the shape (B, C, T, h, w) of a profile's latents, in diffusers' layout, with leading frames.

    ``num_frames`` are those of a video that is made in blended windows; None for the profile's.
    """
    model = manifest.model
    frames = latent_frames(manifest, profile.num_frames if num_frames is None else num_frames)
    return (
        profile.num_videos,
        model.latent_channels,
        frames + leading_latents(manifest, profile),
        profile.height // model.vae_spatial,
        profile.width // model.vae_spatial,
    )


def check_latents(latents: np.ndarray, shape: tuple[int, ...], what: str = "the initial latents") -> None:
    """Raises UsageError, which calls them ``what``, unless latents are finite float32 of this shape."""
    if latents.shape != shape or latents.dtype != np.float32:
        raise UsageError(
            "mismatch",
            f"{what} do not fit the profile",
            expected=f"float32 {shape}",
            found=f"{latents.dtype} {latents.shape}",
            remedy="give them in the layout (B, C, T, h, w)",
        )
    if not np.isfinite(latents).all():
        raise UsageError("not_finite", f"{what} are not finite", expected="numbers", found="NaN or infinity")
