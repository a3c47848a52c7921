"""The config of Wan's published image encoder, field for field, and of a toy."""

from __future__ import annotations

from types import MappingProxyType

from wanbuild.published.settings import Config

PUBLISHED_IMAGE_ENCODER: Config = MappingProxyType(
    {
        "architectures": ["CLIPVisionModel"],
        "attention_dropout": 0.0,
        "dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_size": 1280,
        "image_size": 224,
        "initializer_factor": 1.0,
        "initializer_range": 0.02,
        "intermediate_size": 5120,
        "layer_norm_eps": 1e-5,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 32,
        "patch_size": 14,
        "projection_dim": 1024,
        "torch_dtype": "float32",
        "transformers_version": "4.49.0",
    }
)
"""CLIP ViT-H/14, the vision half: 257 tokens of width 1280."""

TOY_IMAGE_ENCODER: Config = MappingProxyType(
    {
        **PUBLISHED_IMAGE_ENCODER,
        "hidden_size": 28,
        "image_size": 42,
        "intermediate_size": 52,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "projection_dim": 20,
    }
)
"""10 tokens of width 28."""
