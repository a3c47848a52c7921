"""The configs of the published checkpoints, field for field, for benchmarks and as the basis of toys.

From the Wan-AI repositories in the diffusers layout: transformers for text, vae, text_encoder
(google/umt5-xxl), image_processor and model_index. ``wanbuild.published.variant_configs`` has the other
transformers. The configs are read-only; copy one with ``dict(...)`` to change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Config = Mapping[str, Any]

_WAN_2_1, _WAN_2_2 = "0.33.0.dev0", "0.35.0.dev0"
"""The diffusers versions that saved the two generations."""


def changed(config: Config, version: str, **changes: Any) -> Config:
    """Returns a config as another version of diffusers saved it, with changed fields."""
    return MappingProxyType({**config, "_diffusers_version": version, **changes})


def _transformer(layers: int, heads: int, ffn_dim: int) -> Config:
    return MappingProxyType(
        {
            "_class_name": "WanTransformer3DModel",
            "_diffusers_version": _WAN_2_1,
            "added_kv_proj_dim": None,
            "attention_head_dim": 128,
            "cross_attn_norm": True,
            "eps": 1e-6,
            "ffn_dim": ffn_dim,
            "freq_dim": 256,
            "image_dim": None,
            "in_channels": 16,
            "num_attention_heads": heads,
            "num_layers": layers,
            "out_channels": 16,
            "patch_size": [1, 2, 2],
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 1024,
            "text_dim": 4096,
        }
    )


_14B = _transformer(40, 40, 13824)
_A14B = changed(_14B, _WAN_2_2, pos_embed_seq_len=None)

PUBLISHED_TRANSFORMERS: Mapping[str, Config] = MappingProxyType(
    {
        "wan2.1-t2v-1.3b": _transformer(30, 12, 8960),
        "wan2.1-t2v-14b": _14B,
        "wan2.2-t2v-a14b": _A14B,
        "wan2.2-ti2v-5b": changed(
            _A14B,
            _WAN_2_2,
            ffn_dim=14336,
            in_channels=48,
            num_attention_heads=24,
            num_layers=30,
            out_channels=48,
        ),
    }
)
"""The transformers' configs by model; two experts of a model share one."""

PUBLISHED_VAE: Config = MappingProxyType(
    {
        "_class_name": "AutoencoderKLWan",
        "_diffusers_version": _WAN_2_1,
        "attn_scales": [],
        "base_dim": 96,
        "dim_mult": [1, 2, 4, 4],
        "dropout": 0.0,
        "latents_mean": [
            *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
            *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
        ],
        "latents_std": [
            *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
            *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
        ],
        "num_res_blocks": 2,
        "temperal_downsample": [False, True, True],
        "z_dim": 16,
    }
)

PUBLISHED_VAE_IN_A14B: Config = changed(
    PUBLISHED_VAE,
    _WAN_2_2,
    decoder_base_dim=None,
    in_channels=3,
    is_residual=False,
    out_channels=3,
    patch_size=None,
    scale_factor_spatial=8,
    scale_factor_temporal=4,
)
"""The VAE of Wan 2.1, with all fields written out."""

PUBLISHED_VAE_2_2: Config = changed(
    PUBLISHED_VAE,
    _WAN_2_2,
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
"""The VAE of TI2V-5B: residual, 48 latent channels, patches of 2 x 2 pixels."""

PUBLISHED_TEXT_ENCODER: Config = MappingProxyType(
    {
        "architectures": ["UMT5EncoderModel"],
        "classifier_dropout": 0.0,
        "d_ff": 10240,
        "d_kv": 64,
        "d_model": 4096,
        "decoder_start_token_id": 0,
        "dense_act_fn": "gelu_new",
        "dropout_rate": 0.1,
        "eos_token_id": 1,
        "feed_forward_proj": "gated-gelu",
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "is_gated_act": True,
        "layer_norm_epsilon": 1e-6,
        "model_type": "umt5",
        "num_decoder_layers": 24,
        "num_heads": 64,
        "num_layers": 24,
        "output_past": True,
        "pad_token_id": 0,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "scalable_attention": True,
        "tie_word_embeddings": False,
        "tokenizer_class": "T5Tokenizer",
        "torch_dtype": "float32",
        "transformers_version": "4.49.0",
        "use_cache": True,
        "vocab_size": 256384,
    }
)

_MODEL_INDEX: Config = MappingProxyType(
    {
        "_class_name": "WanPipeline",
        "_diffusers_version": _WAN_2_1,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
)

_IMAGE_INDEX: Config = MappingProxyType(
    {
        **_MODEL_INDEX,
        "_class_name": "WanImageToVideoPipeline",
        "image_encoder": ["transformers", "CLIPVisionModel"],
        "image_processor": ["transformers", "CLIPImageProcessor"],
    }
)


def _helios(pipeline_class: str, scheduler: str, **more: bool) -> Config:
    """Returns model_index.json of a Helios."""
    return changed(
        _MODEL_INDEX,
        "0.37.0.dev0",
        _class_name=pipeline_class,
        scheduler=["diffusers", scheduler],
        transformer=["diffusers", "HeliosTransformer3DModel"],
        **more,
    )


MODEL_INDEXES: Mapping[str, Config] = MappingProxyType(
    {
        "wan2.1-t2v": _MODEL_INDEX,
        "wan2.1-i2v": _IMAGE_INDEX,
        "wan2.1-flf2v": _IMAGE_INDEX,
        "wan2.1-vace": changed(
            _MODEL_INDEX,
            "0.34.0.dev0",
            _class_name="WanVACEPipeline",
            transformer=["diffusers", "WanVACETransformer3DModel"],
        ),
        "wan2.2-t2v": changed(
            _MODEL_INDEX,
            _WAN_2_2,
            boundary_ratio=0.875,
            transformer_2=["diffusers", "WanTransformer3DModel"],
        ),
        "wan2.2-i2v": changed(
            _IMAGE_INDEX,
            _WAN_2_2,
            boundary_ratio=0.9,
            image_encoder=[None, None],
            image_processor=[None, None],
            transformer_2=["diffusers", "WanTransformer3DModel"],
        ),
        "wan2.2-vace": changed(
            _MODEL_INDEX,
            "0.36.0.dev0",
            _class_name="WanVACEPipeline",
            boundary_ratio=0.875,
            transformer=["diffusers", "WanVACETransformer3DModel"],
            transformer_2=["diffusers", "WanVACETransformer3DModel"],
        ),
        "wan2.2-ti2v": changed(
            _MODEL_INDEX, _WAN_2_2, boundary_ratio=None, expand_timesteps=True, transformer_2=[None, None]
        ),
        "wan2.2-animate": changed(
            _IMAGE_INDEX,
            "0.36.0.dev0",
            _class_name="WanAnimatePipeline",
            transformer=["diffusers", "WanAnimateTransformer3DModel"],
        ),
        "anyflow-wan2.1": changed(
            _MODEL_INDEX,
            "0.38.0.dev0",
            _class_name="AnyFlowPipeline",
            scheduler=["diffusers", "FlowMapEulerDiscreteScheduler"],
            transformer=["diffusers", "AnyFlowTransformer3DModel"],
        ),
        "anyflow-far-wan2.1": changed(
            _MODEL_INDEX,
            "0.38.0.dev0",
            _class_name="AnyFlowFARPipeline",
            scheduler=["diffusers", "FlowMapEulerDiscreteScheduler"],
            transformer=["diffusers", "AnyFlowFARTransformer3DModel"],
        ),
        "self-forcing-wan2.1": changed(
            _MODEL_INDEX,
            _WAN_2_1,
            _class_name="WanCausalDMDPipeline",
            scheduler=["diffusers", "SelfForcingFlowMatchScheduler"],
            transformer=["diffusers", "CausalWanTransformer3DModel"],
        ),
        "helios-wan2.1": _helios("HeliosPipeline", "HeliosScheduler"),
        "helios-mid-wan2.1": _helios(
            "HeliosPyramidPipeline", "HeliosScheduler", is_cfg_zero_star=True, is_distilled=False
        ),
        "helios-distilled-wan2.1": _helios(
            "HeliosPyramidPipeline", "HeliosDMDScheduler", is_cfg_zero_star=False, is_distilled=True
        ),
    }
)
"""model_index.json by variant, with the plain image encoder that suffices for every pipeline: Wan 2.1 was
saved with its projection, CLIPVisionModelWithProjection, and for FLF2V with a CLIPProcessor."""

PUBLISHED_IMAGE_PROCESSOR: Config = MappingProxyType(
    {
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_processor_type": "CLIPImageProcessor",
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"shortest_edge": 224},
    }
)
"""image_processor/preprocessor_config.json; the additions of other releases do not change its meaning."""
