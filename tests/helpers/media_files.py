"""Artifacts of tasks that take images and videos, as far as their manifest goes, and files to give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
from PIL import Image

from helpers.manifests import plain_manifest, plain_model, with_model, with_profiles
from wanbuild.variants.table import variants
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.media import MediaOption
from wanrun.artifact.model import Chunking, ImageProcessor
from wanrun.artifact.programs import Profile
from wanrun.artifact.task import Input, Task

TASKS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "t2v": ("wan2.1-t2v", {}),
    "i2v": ("wan2.2-i2v", {}),
    "flf2v": ("wan2.1-flf2v", {}),
    "i2v21": ("wan2.1-i2v", {}),
    "ti2v": ("wan2.2-ti2v", {}),
    "vace": ("wan2.1-vace", {"options": {"conditioning_scale": 1.0}}),
    "animate": ("wan2.2-animate", {"leading_latents": 1}),
}
"""The variant of each task, and what a manifest says of its model besides what it says of the toy."""

PIXELS_OF_A_FACE = 32
"""Pixels of a side of a face."""


def task_of(variant: str, face: int = PIXELS_OF_A_FACE, encoder: bool = True) -> Task:
    """What a manifest says of a variant's task.

    Args:
        variant: its name.
        face: pixels of a side of a face.
        encoder: whether images are for the image encoder too, where there is one.
    """
    task = variants()[variant].task_record(SimpleNamespace(motion_encoder_size=face))
    if encoder:
        return task
    inputs = {name: msgspec.structs.replace(item, encoded=False) for name, item in task.inputs.items()}
    return msgspec.structs.replace(task, inputs=inputs)


def make_task(artifact: Path, task: str, references: Sequence[int] = (0,), num_frames: int = 9) -> None:
    """Changes a manifest to one of this task; its weights and programs are still those of the toy.

    Args:
        artifact: its folder, with a manifest of its own.
        task: a key of ``TASKS``.
        references: a profile is made for each of these numbers of reference images.
        num_frames: frames of the profiles.
    """
    manifest = read_manifest(artifact)
    variant, facts = TASKS[task]
    task_record = task_of(variant, encoder=False)
    facts = {"variant": variant, "task": task_record, "options": {}, "leading_latents": 0, **facts}
    one = next(iter(manifest.profiles.values()))
    profiles = [
        msgspec.structs.replace(one, num_references=number, num_frames=num_frames, index=index)
        for index, number in enumerate(references)
    ]
    with_model(with_profiles(manifest, profiles), **facts).write(artifact)


def pixels(seed: int, width: int = 50, height: int = 38) -> np.ndarray:
    """Random colours, uint8 (height, width, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def image(path: Path, seed: int = 0, width: int = 50, height: int = 38) -> Path:
    """Writes an image."""
    Image.fromarray(pixels(seed, width, height)).save(path)
    return path


def frames(folder: Path, count: int, seed: int = 0, width: int = 96, height: int = 64) -> Path:
    """Writes a video as a folder of frames."""
    folder.mkdir()
    for index in range(count):
        image(folder / f"{index}.png", 1000 * seed + index, width, height)
    return folder


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
