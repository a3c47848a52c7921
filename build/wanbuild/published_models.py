"""The weight components of every published repository, with their config.json field for field.

From the Wan-AI hub repositories in the diffusers layout. Two experts of one repository have the same
config. ``wanbuild.published`` has the settings, and the components that toys start from.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from wanbuild.published import PUBLISHED_TEXT_ENCODER, PUBLISHED_TRANSFORMERS, PUBLISHED_VAE, Config

_SMALL, _LARGE = PUBLISHED_TRANSFORMERS["wan2.1-t2v-1.3b"], PUBLISHED_TRANSFORMERS["wan2.1-t2v-14b"]


def _changed(config: Config, version: str, **changes: Any) -> Config:
    return MappingProxyType({**config, "_diffusers_version": version, **changes})


def _image(config: Config, version: str, **changes: Any) -> Config:
    """With image tokens, a condition of 16 channels and a mask of 4."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return _changed(config, version, in_channels=36, image_dim=1280, added_kv_proj_dim=width, **changes)


def _vace(config: Config, every: int) -> Config:
    return _changed(
        config,
        "0.34.0.dev0",
        _class_name="WanVACETransformer3DModel",
        pos_embed_seq_len=None,
        vace_in_channels=96,
        vace_layers=list(range(0, config["num_layers"], every)),
    )


_A14B = _changed(_LARGE, "0.35.0.dev0", pos_embed_seq_len=None)
_ANIMATE = _image(
    _LARGE,
    "0.36.0.dev0",
    _class_name="WanAnimateTransformer3DModel",
    face_encoder_hidden_dim=1024,
    face_encoder_num_heads=4,
    inject_face_latents_blocks=5,
    latent_channels=16,
    motion_dim=20,
    motion_encoder_batch_size=8,
    motion_encoder_channel_sizes=None,
    motion_encoder_dim=512,
    motion_encoder_size=512,
    motion_style_dim=512,
    pos_embed_seq_len=None,
)

_VAE_IN_A14B = _changed(
    PUBLISHED_VAE,
    "0.35.0.dev0",
    decoder_base_dim=None,
    in_channels=3,
    is_residual=False,
    out_channels=3,
    patch_size=None,
    scale_factor_spatial=8,
    scale_factor_temporal=4,
)
_VAE_2_2 = _changed(
    PUBLISHED_VAE,
    "0.35.0.dev0",
    base_dim=160,
    clip_output=False,
    decoder_base_dim=256,
    in_channels=12,
    is_residual=True,
    latents_mean=[
        *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557),
        *(-0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825),
        *(-0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
        *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230),
        *(-0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748),
        *(0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
    ],
    latents_std=[
        *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013),
        *(0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978),
        *(0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
        *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093),
        *(0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887),
        *(0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
    ],
    out_channels=12,
    patch_size=2,
    scale_factor_spatial=16,
    scale_factor_temporal=4,
    z_dim=48,
)

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
"""CLIP ViT-H/14, the vision half."""


def _repository(transformer: Config, vae: Config = PUBLISHED_VAE, **more: Config) -> Mapping[str, Config]:
    return MappingProxyType(
        {"transformer": transformer, "vae": vae, "text_encoder": PUBLISHED_TEXT_ENCODER, **more}
    )


def _with_image(transformer: Config, vae: Config = PUBLISHED_VAE) -> Mapping[str, Config]:
    return _repository(transformer, vae, image_encoder=PUBLISHED_IMAGE_ENCODER)


def _experts(transformer: Config) -> Mapping[str, Config]:
    return _repository(transformer, _VAE_IN_A14B, transformer_2=transformer)


PUBLISHED_MODELS: Mapping[str, Mapping[str, Config]] = MappingProxyType(
    {
        "Wan2.1-T2V-1.3B-Diffusers": _repository(_SMALL),
        "Wan2.1-T2V-14B-Diffusers": _repository(_LARGE),
        "Wan2.1-I2V-14B-480P-Diffusers": _with_image(_image(_LARGE, "0.33.0.dev0")),
        "Wan2.1-FLF2V-14B-720P-diffusers": _with_image(_image(_LARGE, "0.33.0.dev0", pos_embed_seq_len=514)),
        "Wan2.1-VACE-1.3B-diffusers": _repository(_vace(_SMALL, 2)),
        "Wan2.1-VACE-14B-diffusers": _repository(_vace(_LARGE, 5)),
        "Wan2.2-T2V-A14B-Diffusers": _experts(_A14B),
        "Wan2.2-I2V-A14B-Diffusers": _experts(_changed(_A14B, "0.35.0.dev0", in_channels=36)),
        "Wan2.2-TI2V-5B-Diffusers": _repository(
            _changed(
                _A14B,
                "0.35.0.dev0",
                ffn_dim=14336,
                in_channels=48,
                num_attention_heads=24,
                num_layers=30,
                out_channels=48,
            ),
            _VAE_2_2,
        ),
        "Wan2.2-Animate-14B-Diffusers": _with_image(_ANIMATE, _VAE_IN_A14B),
    }
)
"""By repository of the Wan-AI organisation, then by component: every one that holds weights."""
