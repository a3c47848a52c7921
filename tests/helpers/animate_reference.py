"""diffusers' modules of Animate with random values, and small configs for them and ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from diffusers.models.transformers.transformer_wan_animate import MotionConv2d, MotionLinear

from helpers.reference_models import randomise
from wanbuild.models.animate_config import AnimateConfig

SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "num_attention_heads": 2,
        "attention_head_dim": 24,
        "ffn_dim": 64,
        "num_layers": 4,
        "text_dim": 32,
        "freq_dim": 64,
        "image_dim": 40,
        "added_kv_proj_dim": 48,
        "motion_encoder_channel_sizes": {"4": 12, "8": 10, "16": 6, "32": 7, "64": 5},
        "motion_encoder_size": 16,
        "motion_style_dim": 18,
        "motion_dim": 5,
        "motion_encoder_dim": 14,
        "face_encoder_hidden_dim": 20,
        "face_encoder_num_heads": 3,
        "inject_face_latents_blocks": 2,
        "motion_encoder_batch_size": 4,
    }
)


def config(**changes: Any) -> AnimateConfig:
    """Our config of ``SIZES``."""
    return AnimateConfig(**{**SIZES, **changes})


def randomised(module: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """``randomise``, with weights of deviation one in the motion encoder, which scales them as it uses them.

    Otherwise they are scaled twice, and a motion hardly depends on the face.
    """
    randomise(module, seed)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, MotionConv2d | MotionLinear):
                part.weight.mul_(math.sqrt(part.weight[0].numel()))
    return {name: value.numpy() for name, value in module.state_dict().items()}


def faces(seed: int, frames: int, size: int) -> np.ndarray:
    """Random pixels, uint8 (F, S, S, 3)."""
    return np.random.default_rng((seed, frames, size)).integers(0, 256, (frames, size, size, 3), np.uint8)


def as_reference(video: np.ndarray) -> torch.Tensor:
    """uint8 (F, S, S, 3) to float32 (F, 3, S, S) in [-1, 1], as diffusers' VideoProcessor has it."""
    return torch.from_numpy(video.astype(np.float32) / 255).permute(0, 3, 1, 2) * 2 - 1
