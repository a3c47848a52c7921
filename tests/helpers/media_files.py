"""Artifacts of tasks that take images and videos, as far as their manifest goes, and files to give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from helpers.manifests import with_model, with_profiles
from wanrun.artifact.manifest import read_manifest

TASKS: Mapping[str, Mapping[str, Any]] = {
    "t2v": {"variant": "wan2.1-t2v", "inputs": {}},
    "i2v": {"variant": "wan2.2-i2v", "inputs": {"image": "required", "last_image": "optional"}},
    "flf2v": {"variant": "wan2.1-flf2v", "inputs": {"image": "required", "last_image": "required"}},
    "i2v21": {"variant": "wan2.1-i2v", "task": "i2v", "inputs": {"image": "required"}},
    "ti2v": {"variant": "wan2.2-ti2v", "inputs": {"image": "optional"}},
    "vace": {
        "variant": "wan2.1-vace",
        "inputs": {"video": "optional", "mask": "optional", "reference_image": "optional"},
        "options": {"conditioning_scale": 1.0},
    },
    "animate": {
        "variant": "wan2.2-animate",
        "inputs": {
            **dict.fromkeys(("image", "pose_video", "face_video"), "required"),
            **dict.fromkeys(("background_video", "mask_video"), "replace"),
        },
        "leading_latents": 1,
        "face_size": 32,
        "options": {"segment_overlap": 1},
    },
}
"""What a manifest's model says of each task, besides what it says of the toy."""


def make_task(artifact: Path, task: str, references: Sequence[int] = (0,), num_frames: int = 9) -> None:
    """Changes a manifest to one of this task; its weights and programs are still those of the toy.

    Args:
        artifact: its folder, with a manifest of its own.
        task: a key of ``TASKS``.
        references: a profile is made for each of these numbers of reference images.
        num_frames: frames of the profiles.
    """
    manifest = read_manifest(artifact)
    facts = {"task": task, "leading_latents": 0, "size_multiple": 16, **TASKS[task]}
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
