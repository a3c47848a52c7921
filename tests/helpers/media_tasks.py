"""Manifests of every variant as far as reading media takes them, and one profile."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile

INPUTS: Mapping[str, Mapping[str, str]] = {
    "wan2.1-t2v": {},
    "wan2.1-i2v": {"image": "required"},
    "wan2.1-flf2v": {"image": "required", "last_image": "required"},
    "wan2.2-i2v": {"image": "required", "last_image": "optional"},
    "wan2.2-ti2v": {"image": "optional"},
    "wan2.1-vace": {"video": "optional", "mask": "optional", "reference_image": "optional"},
    "wan2.2-animate": {
        **dict.fromkeys(("image", "pose_video", "face_video"), "required"),
        **dict.fromkeys(("background_video", "mask_video"), "replace"),
    },
}
CLIP = {
    "shortest_edge": 30,
    "crop": 30,
    "mean": [0.48, 0.46, 0.41],
    "std": [0.27, 0.26, 0.28],
    "rescale_factor": 1 / 255,
    "resample": 3,
}
WITH_ENCODER = ("wan2.1-i2v", "wan2.1-flf2v", "wan2.2-animate")
WIDTH, HEIGHT, FRAMES, FACE = 64, 48, 9, 20


def manifest_of(variant: str) -> Manifest:
    model: dict[str, Any] = {
        "variant": variant,
        "task": variant.split("-")[1],
        "inputs": INPUTS[variant],
        "vae_spatial": 8,
        "size_multiple": 16,
        "face_size": FACE,
    }
    if variant in WITH_ENCODER:
        model["image_processor"] = CLIP
    return cast(Manifest, SimpleNamespace(model=model))


def profile_of(num_references: int = 0, num_frames: int = FRAMES) -> Profile:
    return cast(
        Profile,
        SimpleNamespace(width=WIDTH, height=HEIGHT, num_frames=num_frames, num_references=num_references),
    )
