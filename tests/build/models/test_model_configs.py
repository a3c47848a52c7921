"""Configs of models whose fields do not fit together are refused, each with the field that is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from wanbuild.components import KINDS
from wanbuild.config import ConfigError, parse_config
from wanbuild.models.animate_config import AnimateConfig
from wanbuild.models.clip_config import ImageEncoderConfig
from wanbuild.models.helios import HeliosConfig
from wanbuild.models.transformer_config import TransformerConfig
from wanbuild.models.vace import VACEConfig
from wanbuild.models.vae_config import TinyVAEConfig, VAEConfig
from wanbuild.published.variant_configs import PUBLISHED_MODELS, TOY_IMAGE_ENCODER
from wanbuild.toy.toy_configs import TOY_VARIANTS
from wanrun.artifact.parameters import DtypePolicy
from wanrun.errors import SourceError

Row = tuple[Mapping[str, Any], str]
"""Changes of a config, and what its error says."""


def toy(variant: str) -> dict[str, Any]:
    return dict(TOY_VARIANTS[variant].configs["transformer"])


WITH_TOKENS: Sequence[Row] = [
    ({"image_dim": 40}, "image_dim 40 needs 40"),
    ({"added_kv_proj_dim": 40}, "added_kv_proj_dim is 40"),
    ({"pos_embed_seq_len": 20}, "pos_embed_seq_len is 20"),
    ({"image_dim": 40, "added_kv_proj_dim": 32}, "added_kv_proj_dim is 32"),
]
VACE: Sequence[Row] = [
    *(({"vace_layers": layers}, "vace_layers is") for layers in ([0, 3], [1, 2], [0, 2, 1], [0, 0], [])),
    ({"image_dim": 40, "added_kv_proj_dim": 40}, "image"),
]
HELIOS: Sequence[Row] = [
    ({"rope_dim": [44, 42, 42]}, r"rope_dim is \[44, 42, 42\], and a head here has \[8, 6, 6\]"),
    ({"patch_size": [1, 1, 2]}, r"patch_size is \[1, 1, 2\], and Helios has \[1, 2, 2\]"),
    ({"image_dim": 8, "added_kv_proj_dim": 40}, "image_dim is 8"),
]
CHANNELS = "motion_encoder_channel_sizes"
ANIMATE: Sequence[Row] = [
    ({"inject_face_latents_blocks": 3}, "does not divide num_layers 4"),
    ({"inject_face_latents_blocks": 8}, "does not divide num_layers 4"),
    ({"in_channels": 35}, "latent_channels 16 needs 36"),
    ({"in_channels": None}, "in_channels is None: Expected `int`"),
    ({"latent_channels": None}, "latent_channels is None: Expected `int`"),
    ({"motion_encoder_size": 24}, "not a power of two"),
    ({"motion_encoder_size": 2}, "not a power of two"),
    ({"motion_encoder_size": 128}, "has None for 128 pixels"),
    ({"motion_encoder_size": 2048, CHANNELS: None}, "has None for 2048 pixels"),
    ({CHANNELS: {"4": 12, "16": 6}}, "has None for 8 pixels"),
    ({CHANNELS: {"4": 12, "8": 0, "16": 6}}, "has 0 for 8 pixels"),
    ({CHANNELS: {"4": 12, "8": True, "16": 6}}, "has True for 8 pixels"),
    ({CHANNELS: {"4": 12, "8": [1], "16": "6"}}, "has '6' for 16 pixels"),
    ({CHANNELS: [12, 8, 6]}, "Expected `object"),
    ({"motion_encoder_size": None}, "motion_encoder_size is None"),
    ({"motion_dim": 15}, "more than motion_encoder_dim 14"),
    ({"patch_size": [2, 2, 2]}, "single latent frames"),
    ({"patch_size": []}, r"patch_size is \[\]: Expected `array` of length 3"),
    ({"added_kv_proj_dim": None}, "added_kv_proj_dim is None"),
    ({"_class_name": "WanTransformer3DModel"}, "another class"),
    ({"face_dim": 1}, "unknown field face_dim"),
]
IMAGE_ENCODER: Sequence[Row] = [
    ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new', not 'gelu' or 'quick_gelu'"),
    ({"hidden_act": None}, "hidden_act is None: Expected `str`"),
    ({"qkv_bias": True}, "unknown field qkv_bias = True"),
    ({"model_type": "siglip_vision_model"}, "only 'clip_vision_model' is supported"),
    ({"architectures": ["SiglipVisionModel"]}, "expected CLIPVisionModel or CLIP.*; found 'SiglipV"),
    ({"num_attention_heads": 3}, "hidden_size 28 is not 3 equal heads"),
    ({"num_channels": 4}, "num_channels is 4 and images have 3"),
    ({"patch_size": 43}, "patch_size 43 is larger than image_size 42"),
    ({"image_size": [42, 42]}, r"image_size is \[42, 42\]: Expected `int`"),
    ({"layer_norm_eps": "1e-5"}, "layer_norm_eps is '1e-5': Expected"),
]
VAE: Sequence[Row] = [
    ({"z_dim": 48}, "latents_mean"),
    ({"dim_mult": [1, 2]}, "dim_mult"),
    ({"temperal_downsample": [True, True, True]}, "temperal_downsample"),
    ({"surprise": 1}, "surprise"),
]
RESIDUAL_VAE: Sequence[Row] = [
    ({"patch_size": None}, "patch_size is None where is_residual True needs 2"),
    ({"patch_size": 1}, "patch_size is 1 where"),
    ({"is_residual": False}, "patch_size is 2 where is_residual False needs None"),
    ({"in_channels": 3}, "in_channels is 3 where patch_size 2 needs 12"),
    ({"out_channels": 3}, "out_channels is 3 where"),
    ({"scale_factor_spatial": 8}, "scale_factor_spatial is 8 where patch_size 2 needs 16"),
    ({"patch_size": None, "is_residual": False}, "in_channels is 12 where patch_size None needs 3, out"),
    ({"z_dim": 16}, "latents_mean has 48 values for z_dim 16"),
    ({"dim_mult": [1, 2, 4, 5]}, "a shortcut of the encoder cannot average 4 to 5"),
    ({"dim_mult": [1, 3, 3, 3]}, "a shortcut of the encoder cannot average 8 to 3"),
    ({"dim_mult": [1, 1, 8, 8]}, "a shortcut of the decoder cannot repeat 8 to 4"),
    ({"dim_mult": [1, 2, 0, 0]}, "a level without channels"),
    ({"clip": True}, "unknown field clip"),
]
TABLE: Sequence[tuple[Any, Mapping[str, Any], Sequence[Row]]] = [
    (TransformerConfig, toy("wan2.1-t2v"), WITH_TOKENS),
    (VACEConfig, toy("wan2.1-vace"), VACE),
    (HeliosConfig, toy("helios-wan2.1"), HELIOS),
    (AnimateConfig, toy("wan2.2-animate"), ANIMATE),
    (ImageEncoderConfig, TOY_IMAGE_ENCODER, IMAGE_ENCODER),
    (VAEConfig, {"_class_name": "AutoencoderKLWan"}, VAE),
    (VAEConfig, PUBLISHED_MODELS["Wan2.2-TI2V-5B-Diffusers"]["vae"], RESIDUAL_VAE),
]
CASES = [(kind, base, *row) for kind, base, rows in TABLE for row in rows]


@pytest.mark.parametrize(("kind", "base", "changes", "problem"), CASES)
def test_fields_that_do_not_fit_together(
    kind: Any, base: Mapping[str, Any], changes: Mapping[str, Any], problem: str
) -> None:
    parse_config(kind, base, "config.json")
    with pytest.raises(SourceError, match=problem) as caught:
        parse_config(kind, {**base, **changes}, "config.json")
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changed", [{"widths": (8, 8)}, {"stored_frames": (1, 2)}, {"stored_frames": (1, 1, 2)}]
)
def test_other_levels_of_a_tiny_decoder(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not fit"):
        TinyVAEConfig(16, **changed)


def test_channels_of_animate_that_are_left_out() -> None:
    given = {name: one for name, one in toy("wan2.2-animate").items() if not name.endswith("_channels")}
    parsed = parse_config(AnimateConfig, given, "config.json")
    assert (parsed.in_channels, parsed.latent_channels, parsed.out_channels) == (36, 16, 16)


def test_the_published_residual_vae() -> None:
    published = PUBLISHED_MODELS["Wan2.2-TI2V-5B-Diffusers"]["vae"]
    config = parse_config(VAEConfig, published, "config.json")
    assert (config.spatial, config.z_dim, config.decoder_dim) == (16, 48, 256)
    assert list(config.latents_mean) == published["latents_mean"]
    assert list(config.latents_std) == published["latents_std"]


def test_the_published_image_encoder() -> None:
    published = PUBLISHED_MODELS["Wan2.1-I2V-14B-480P-Diffusers"]["image_encoder"]
    config = parse_config(ImageEncoderConfig, published, "config.json")
    assert (config.num_tokens, config.hidden_size, config.num_hidden_layers) == (257, 1280, 32)
    assert (config.hidden_act, config.layer_norm_eps) == ("gelu", 1e-5)
    assert KINDS["image_encoder"].policy(None) == DtypePolicy(weights="bfloat16", norms="float32")
