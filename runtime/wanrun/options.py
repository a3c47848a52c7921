"""The options of one generation: defaults from the manifest, and checks against the profile."""

from __future__ import annotations

from typing import Any

import numpy as np

from wanrun.errors import UsageError
from wanrun.manifest import Manifest, Profile


def latents_shape(manifest: Manifest, profile: Profile) -> tuple[int, int, int, int, int]:
    """Shape (B, C, T, h, w) of a profile's latents, as diffusers takes them."""
    model = manifest.model
    return (
        profile.num_videos,
        model["latent_channels"],
        (profile.num_frames - 1) // model["vae_temporal"] + 1,
        profile.height // model["vae_spatial"],
        profile.width // model["vae_spatial"],
    )


_MAX_GUIDANCE = float(np.finfo(np.float32).max)  # a float: NumPy would cast what it is compared with
_MAX_STEPS = 10_000  # a table of ten times more takes seconds, and nothing is gained by it


def check_numbers(
    steps: int | None, guidance_scale: float | None, fps: float | None, prefix: str = ""
) -> None:
    """Refuses what no profile and no video can have; None is the artifact's default.

    Args:
        steps: denoising steps.
        guidance_scale: strength of the guidance.
        fps: frames per second.
        prefix: what stands before an option's name in messages.

    Raises:
        UsageError: naming the option that is out of range.
    """
    if fps is not None and not 0.1 <= fps <= 240:  # what every container can hold
        raise UsageError(f"{prefix}fps is out of range", expected="0.1 to 240", found=fps)
    if guidance_scale is not None and not abs(guidance_scale) <= _MAX_GUIDANCE:
        name = "guidance-scale" if prefix else "guidance_scale"
        raise UsageError(f"{prefix}{name} is out of range", expected="a number", found=guidance_scale)
    if steps is not None and steps > _MAX_STEPS:
        raise UsageError("the number of steps is too large", expected=f"at most {_MAX_STEPS}", found=steps)


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


def resolve_options(manifest: Manifest, profile: Profile, **given: Any) -> dict[str, Any]:
    """The options of a generation with the manifest's defaults filled in: what the metadata records.

    Raises:
        UsageError: for a guidance scale that does not fit the profile or is not a number.
    """
    defaults = manifest.model["defaults"]
    options = {name: defaults.get(name) if value is None else value for name, value in given.items()}
    options |= {"width": profile.width, "height": profile.height, "num_frames": profile.num_frames}
    scale = float(options["guidance_scale"])
    if not profile.guidance:
        options["guidance_scale"], options["negative_prompt"] = 1.0, None
    elif not np.isfinite(scale):
        raise UsageError("--guidance-scale is out of range", expected="a finite number", found=scale)
    return options
