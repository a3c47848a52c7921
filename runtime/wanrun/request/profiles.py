"""Chooses the built profile for a request and for ``load``, by one rule; nothing is rounded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.media import SEVERAL
from wanrun.artifact.possible import check_in_chunks
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import named_profile, select_profile
from wanrun.errors import ArtifactError, UsageError, field


def has_guidance(manifest: Manifest, scale: float | None = None) -> bool:
    """Returns whether guidance is on: a guidance scale, by default the model's own, above 1 turns it on.

    The low-noise expert's scale does not count (``do_classifier_free_guidance`` of diffusers' Wan pipelines).
    """
    return bool((manifest.model.defaults.guidance_scale if scale is None else scale) > 1)


def choose_profile(
    artifact: Artifact,
    shape: Mapping[str, object],
    loaded: Profile | None = None,
    unguided: bool = False,
    begins: bool = False,
) -> Profile:
    """Returns the built profile of a shape; nothing is rounded.

    ``shape`` is what is asked for, by the names of ``Profile.shape``; None means not given. What it leaves
    out is the loaded profile's. Without a loaded profile it is the first built one's that fits, with guidance
    or without as the model has it, and the other way if only such a profile fits. If a video to begin with is
    given (``begins``), a fitting profile that takes it is chosen.

    ``unguided`` videos have no guidance. Profiles with guidance make those too; unless one is loaded, a
    profile of the same shape without guidance is taken, if it is built and takes as many LoRAs, NAG where the
    other does, and a video to begin with where that does.

    Raises ArtifactError, listing the built profiles, if none fits; UsageError if the shape names a profile,
    and also something that this profile does not have.
    """
    given: dict[str, Any] = {name: value for name, value in shape.items() if value is not None}
    if "profile" in given:
        profile = named_profile(artifact, given["profile"])
        _check_same(profile, given)
        return profile
    if loaded is not None:
        given = {**loaded.shape, **given}
    check_in_chunks(artifact.manifest.model, given.get("num_videos", 1), given.get("guidance", False))
    either = unguided or "guidance" not in given
    guidance = given.pop("guidance", has_guidance(artifact.manifest))
    choose = partial(select_profile, artifact, **given, begins=begins)
    try:
        profile = choose(guidance=guidance)
    except ArtifactError:
        if either:
            with suppress(ArtifactError):
                return choose(guidance=not guidance)
        return choose(guidance=guidance and not unguided)  # the error says what was asked for
    if unguided and loaded is None:
        with suppress(ArtifactError):
            other = select_profile(artifact, **{**profile.shape, "guidance": False})
            return profile if _can_less(other, profile) else other
    return profile


def _can_less(one: Profile, other: Profile) -> bool:
    """Returns whether a profile takes fewer LoRAs than another, or no NAG or no video where that does."""
    names = ("lora_rank", "nag", "video_to_video")
    return any(getattr(one.options, name) < getattr(other.options, name) for name in names)


def _check_same(profile: Profile, given: Mapping[str, Any]) -> None:
    """Raises UsageError for a shape that a named profile does not have."""
    for name, built in profile.shape.items():
        found = given.get(name, built)
        if found != built:
            option = field(SEVERAL if name == "num_references" else name)
            raise UsageError(
                "mismatch",
                f"profile {profile.name} has another {option}",
                expected=_text(built),
                found=_text(found),
                remedy=f"leave out {option} or {field('profile')}",
            )


def _text(value: Any) -> str:
    """Returns a value of a shape for messages: a size as ``832x480``."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
