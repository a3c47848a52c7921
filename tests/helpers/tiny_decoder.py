"""A file of a tiny decoder with random weights, under the published names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from wanbuild.source.shapes import component_shapes
from wanbuild.toy.toy_weights import random_tensor


def tiny_state(
    channels: int = 16,
    patch: int = 1,
    widths: Sequence[int] = (8, 8, 8, 8),
    stored: Sequence[int] = (1, 2, 2),
) -> dict[str, np.ndarray]:
    """The tensors by name, with one of an encoder; frames lie around the middle of [0, 1]."""
    config = {
        "latent_channels": channels,
        "patch_size": patch,
        "widths": list(widths),
        "stored_frames": list(stored),
    }
    state = {
        name: random_tensor("tiny_vae", name, shape, 0)
        for name, shape in component_shapes("tiny_vae", config).items()
    }
    state["decoder.22.weight"] *= 0.3
    state["decoder.22.bias"] += np.float32(0.5)
    return {**state, "encoder.0.weight": np.ones((4, 3, 3, 3), np.float32)}


def write_tiny(file: Path, dtype: str = "float16", **options: int) -> Path:
    """Writes the file; options as of ``tiny_state``."""
    save_file({name: value.astype(dtype) for name, value in tiny_state(**options).items()}, file)
    return file
