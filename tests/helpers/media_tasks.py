"""Manifests of every variant as far as reading media takes them, and one profile."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

from helpers.manifests import plain_manifest, plain_model
from helpers.media_files import task_of
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.media import MediaOption
from wanrun.artifact.model import Chunking, ImageProcessor
from wanrun.artifact.programs import Profile
from wanrun.artifact.task import Input

VARIANTS = (
    *("wan2.1-t2v", "wan2.1-i2v", "wan2.1-flf2v", "wan2.2-i2v", "wan2.2-ti2v", "wan2.1-vace"),
    "wan2.2-animate",
)
INPUTS: Mapping[str, Mapping[MediaOption, Input]] = {name: task_of(name).inputs for name in VARIANTS}
CLIP = ImageProcessor(
    shortest_edge=30,
    crop=30,
    resample=3,
    rescale_factor=1 / 255,
    mean=(0.48, 0.46, 0.41),
    std=(0.27, 0.26, 0.28),
)
WITH_ENCODER = ("wan2.1-i2v", "wan2.1-flf2v", "wan2.2-animate")
IN_CHUNKS = {
    "anyflow-far-wan2.1": Chunking(first=1, each=3),
    "helios-wan2.1": Chunking(first=3, each=3, alone=True),
}
WIDTH, HEIGHT, FRAMES, FACE = 64, 48, 9, 20


def manifest_of(variant: str) -> Manifest:
    return plain_manifest(
        model=plain_model(
            variant=variant,
            task=task_of(variant, FACE),
            image_processor=CLIP if variant in WITH_ENCODER else None,
            chunks=IN_CHUNKS.get(variant),
        )
    )


def profile_of(num_references: int = 0, num_frames: int = FRAMES) -> Profile:
    return cast(
        Profile,
        SimpleNamespace(width=WIDTH, height=HEIGHT, num_frames=num_frames, num_references=num_references),
    )
