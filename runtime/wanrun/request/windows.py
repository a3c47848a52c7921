"""The windows of a text-only video that has more frames than its profile."""

from __future__ import annotations

from typing import Final

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.denoising.latents import latent_frames
from wanrun.errors import UsageError, field
from wanrun.request.request import Request

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
