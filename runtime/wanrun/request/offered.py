"""Conditions of a generation's options: on an artifact's manifest, and on how a profile is built."""

from __future__ import annotations

__all__ = ["offered"]

from collections.abc import Callable

from wanrun.artifact.manifest import TINY_VAE, Manifest
from wanrun.artifact.programs import ProfileOptions
from wanrun.rows import Row


def offered(row: Row, manifest: Manifest) -> bool:
    """Returns whether a model has an option: by ``needs``; else if all have it, or as an input or default."""
    if row.needs is not None:
        return row.needs(manifest)
    model = manifest.model
    return not row.models or row.name in model.task.inputs or row.name in model.default_options()


def begins_with_video(manifest: Manifest) -> bool:
    """Whether steps may begin with a video."""
    return manifest.model.task.start is not None


def continues(manifest: Manifest) -> bool:
    """Whether a clip can continue another one."""
    return manifest.model.task.chained is not None


def of_text_alone(manifest: Manifest) -> bool:
    """Whether videos are made without an image or a video."""
    return not manifest.model.task.always_encodes


def two_experts(manifest: Manifest) -> bool:
    """Whether there is a high-noise and a low-noise expert."""
    return "boundary" in manifest.model.options


def tiny_decoder(manifest: Manifest) -> bool:
    """Whether there is a tiny decoder."""
    return TINY_VAE in manifest.components


def for_guider(*names: str) -> Callable[[ProfileOptions], bool]:
    """Returns whether a profile is built for one of some guiders; without names, for any."""
    return lambda options: any(not names or one in names for one in options.guiders)


def for_nag(options: ProfileOptions) -> bool:
    """Whether a profile is built for NAG."""
    return options.nag


def with_slots(options: ProfileOptions) -> bool:
    """Whether a profile has slots for LoRAs."""
    return options.lora_rank > 0
