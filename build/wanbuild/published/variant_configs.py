"""The components with weights of every published repository, with their config.json field for field.

From the Wan-AI hub repositories in the diffusers layout. Two experts of one repository have the same config.
``wanbuild.published.base_configs`` has the settings, and the components that toys derive from.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from wanbuild.published.base_configs import (
    PUBLISHED_TEXT_ENCODER,
    PUBLISHED_TRANSFORMERS,
    PUBLISHED_VAE,
    PUBLISHED_VAE_2_2,
    PUBLISHED_VAE_IN_A14B,
    Config,
    changed,
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

_SMALL, _LARGE = PUBLISHED_TRANSFORMERS["wan2.1-t2v-1.3b"], PUBLISHED_TRANSFORMERS["wan2.1-t2v-14b"]
_A14B = PUBLISHED_TRANSFORMERS["wan2.2-t2v-a14b"]


def _image(config: Config, version: str, **changes: Any) -> Config:
    """Returns a config with image tokens, a condition of 16 channels and a mask of 4."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return changed(config, version, in_channels=36, image_dim=1280, added_kv_proj_dim=width, **changes)


def _vace(config: Config, every: int, version: str = "0.34.0.dev0") -> Config:
    return changed(
        config,
        version,
        _class_name="WanVACETransformer3DModel",
        pos_embed_seq_len=None,
        vace_in_channels=96,
        vace_layers=list(range(0, config["num_layers"], every)),
    )


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


def _anyflow(config: Config) -> Config:
    """Returns a config as AnyFlowTransformer3DModel saves it, which has fewer fields than Wan's class."""
    kept = {name: value for name, value in config.items() if name not in ("added_kv_proj_dim", "qk_norm")}
    own = {"_class_name": "AnyFlowTransformer3DModel", "deltatime_type": "r", "gate_value": 0.25}
    return changed(kept, "0.38.0.dev0", **own)


def _anyflow_far(config: Config) -> Config:
    """Returns a config as AnyFlowFARTransformer3DModel saves it."""
    own = {"_class_name": "AnyFlowFARTransformer3DModel", "compressed_patch_size": [1, 4, 4]}
    more = {"full_chunk_limit": 3, "chunk_partition": [1, 3, 3, 3, 3, 3, 3, 2]}
    return changed(_anyflow(config), "0.38.0.dev0", **own, **more)


def _self_forcing(config: Config) -> Config:
    """Returns a config of FastVideo's causal class, with its own fields, which are its defaults."""
    own = {"local_attn_size": -1, "num_frames_per_block": 3, "sink_size": 0}
    return changed(config, "0.33.0.dev0", _class_name="CausalWanTransformer3DModel", **own)


def _helios(config: Config) -> Config:
    """Returns a config as HeliosTransformer3DModel saves it."""
    kept = {name: value for name, value in config.items() if name not in ("rope_max_seq_len", "image_dim")}
    return changed(
        kept,
        "0.37.0.dev0",
        _class_name="HeliosTransformer3DModel",
        added_kv_proj_dim=None,
        guidance_cross_attn=True,
        has_multi_term_memory_patch=True,
        history_scale_mode="per_head",
        is_amplify_history=False,
        rope_dim=[44, 42, 42],
        rope_theta=10000.0,
        zero_history_timestep=True,
    )


def _repository(transformer: Config, vae: Config = PUBLISHED_VAE, **more: Config) -> Mapping[str, Config]:
    return MappingProxyType(
        {"transformer": transformer, "vae": vae, "text_encoder": PUBLISHED_TEXT_ENCODER, **more}
    )


def _with_image(transformer: Config, vae: Config = PUBLISHED_VAE) -> Mapping[str, Config]:
    return _repository(transformer, vae, image_encoder=PUBLISHED_IMAGE_ENCODER)


def _experts(transformer: Config) -> Mapping[str, Config]:
    return _repository(transformer, PUBLISHED_VAE_IN_A14B, transformer_2=transformer)


PUBLISHED_MODELS: Mapping[str, Mapping[str, Config]] = MappingProxyType(
    {
        "Wan2.1-T2V-1.3B-Diffusers": _repository(_SMALL),
        "Wan2.1-T2V-14B-Diffusers": _repository(_LARGE),
        "Wan2.1-I2V-14B-480P-Diffusers": _with_image(_image(_LARGE, "0.33.0.dev0")),
        "Wan2.1-I2V-14B-720P-Diffusers": _with_image(_image(_LARGE, "0.33.0.dev0")),
        "Wan2.1-FLF2V-14B-720P-diffusers": _with_image(_image(_LARGE, "0.33.0.dev0", pos_embed_seq_len=514)),
        "Wan2.1-VACE-1.3B-diffusers": _repository(_vace(_SMALL, 2)),
        "Wan2.1-VACE-14B-diffusers": _repository(_vace(_LARGE, 5)),
        "Wan2.2-T2V-A14B-Diffusers": _experts(_A14B),
        "Wan2.2-I2V-A14B-Diffusers": _experts(changed(_A14B, "0.35.0.dev0", in_channels=36)),
        "Wan2.2-VACE-Fun-14B-diffusers": _experts(_vace(_LARGE, 5, "0.36.0.dev0")),
        "Wan2.2-TI2V-5B-Diffusers": _repository(PUBLISHED_TRANSFORMERS["wan2.2-ti2v-5b"], PUBLISHED_VAE_2_2),
        "Wan2.2-Animate-14B-Diffusers": _with_image(_ANIMATE, PUBLISHED_VAE_IN_A14B),
        "AnyFlow-Wan2.1-T2V-1.3B-Diffusers": _repository(_anyflow(_SMALL)),
        "AnyFlow-Wan2.1-T2V-14B-Diffusers": _repository(_anyflow(_LARGE)),
        "AnyFlow-FAR-Wan2.1-1.3B-Diffusers": _repository(_anyflow_far(_SMALL)),
        "AnyFlow-FAR-Wan2.1-14B-Diffusers": _repository(_anyflow_far(_LARGE)),
        "Self-Forcing-Wan2.1-1.3B": _repository(_self_forcing(_SMALL)),
        **dict.fromkeys(
            ("Helios-Base", "Helios-Mid", "Helios-Distilled"), _repository(_helios(_LARGE), PUBLISHED_VAE)
        ),
    }
)
"""By repository of the Wan-AI organisation (VACE-Fun: linoyts; AnyFlow: nvidia; Helios: BestWishYsh), then by
component with weights. AnyFlow's transformers are as diffusers saves them; those first published had NVlabs'
own class (``source.former_names``), as those of Helios do. That of Self-Forcing is gdhe17/Self-Forcing's,
which has no config."""
