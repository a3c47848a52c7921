"""Configs of toy checkpoints by variant: the published configs with small sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from wanbuild.models.clip_config import image_tokens
from wanbuild.published.base_configs import (
    MODEL_INDEXES,
    PUBLISHED_IMAGE_PROCESSOR,
    PUBLISHED_TEXT_ENCODER,
    PUBLISHED_TRANSFORMERS,
    PUBLISHED_VAE,
    PUBLISHED_VAE_2_2,
    PUBLISHED_VAE_IN_A14B,
    Config,
)
from wanbuild.published.variant_configs import PUBLISHED_MODELS, TOY_IMAGE_ENCODER
from wanbuild.toy.toy_tokenizer import vocabulary
from wanbuild.variants.table import variants
from wanrun.errors import UsageError


@dataclass(frozen=True)
class ToyVariant:
    """The configs of one variant's toy: config.json of every component with weights.

    ``index`` is model_index.json without the scheduler's class.
    """

    configs: Mapping[str, Config]
    index: Config


def _toy(published: Config, **sizes: Any) -> Config:
    return MappingProxyType({**published, **sizes})


# Head size 20 splits into 8, 6 and 6 for RoPE, as uneven as the published 44, 42 and 42. Sizes that differ
# in the published config also differ here, so that a swapped axis is an error.
_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "num_attention_heads": 2,
        "attention_head_dim": 20,
        "ffn_dim": 56,
        "freq_dim": 64,
        "num_layers": 3,
        "text_dim": 32,
    }
)
_WIDTH = _SIZES["num_attention_heads"] * _SIZES["attention_head_dim"]

# The reference's own small models omit added_kv_proj_dim, so their image tokens have no effect.
_IMAGE_SIZES: Mapping[str, Any] = MappingProxyType(
    {**_SIZES, "image_dim": TOY_IMAGE_ENCODER["hidden_size"], "added_kv_proj_dim": _WIDTH}
)

# Two adapters, so that swapped rows are visible, and blocks without an adapter.
_ANIMATE_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        **_IMAGE_SIZES,
        "num_layers": 4,
        "inject_face_latents_blocks": 2,
        "motion_encoder_size": 16,
        "motion_encoder_channel_sizes": {"4": 10, "8": 8, "16": 6},
        "motion_style_dim": 18,
        "motion_dim": 5,
        "motion_encoder_dim": 14,
        "face_encoder_hidden_dim": 12,
        "face_encoder_num_heads": 3,
    }
)


def _tokens(image_encoder: Mapping[str, Any]) -> int:
    return image_tokens(image_encoder["image_size"], image_encoder["patch_size"])


TOY_TRANSFORMER = _toy(PUBLISHED_TRANSFORMERS["wan2.1-t2v-1.3b"], **_SIZES)
TOY_VAE = _toy(PUBLISHED_VAE, base_dim=6, num_res_blocks=1)
TOY_VAE_2_2 = _toy(PUBLISHED_VAE_2_2, base_dim=6, decoder_base_dim=8, num_res_blocks=1)
TOY_TEXT_ENCODER = _toy(
    PUBLISHED_TEXT_ENCODER,
    d_ff=37,
    d_kv=8,
    d_model=32,
    num_decoder_layers=2,
    num_heads=4,
    num_layers=2,
    relative_attention_num_buckets=8,
    # A few more rows than the tokenizer has ids, as published.
    vocab_size=len(vocabulary()) + 16,
)
_TOY_VAE_IN_A14B = _toy(PUBLISHED_VAE_IN_A14B, base_dim=6, num_res_blocks=1)


def _of(repository: str, sizes: Mapping[str, Any], **more: Any) -> Config:
    """Returns the transformer's config of a published repository, with other sizes."""
    return _toy(PUBLISHED_MODELS[repository]["transformer"], **sizes, **more)


def _variant(name: str, vae: Config, **others: Config) -> ToyVariant:
    configs = {**others, "vae": vae, "text_encoder": TOY_TEXT_ENCODER}
    return ToyVariant(MappingProxyType(configs), MODEL_INDEXES[name])


def _experts(name: str, transformer: Config) -> ToyVariant:
    return _variant(name, _TOY_VAE_IN_A14B, transformer=transformer, transformer_2=transformer)


def _with_image(name: str, vae: Config, transformer: Config) -> ToyVariant:
    return _variant(name, vae, transformer=transformer, image_encoder=TOY_IMAGE_ENCODER)


TOY_VARIANTS: Mapping[str, ToyVariant] = MappingProxyType(
    {
        "wan2.1-t2v": _variant("wan2.1-t2v", TOY_VAE, transformer=TOY_TRANSFORMER),
        "wan2.1-i2v": _with_image("wan2.1-i2v", TOY_VAE, _of("Wan2.1-I2V-14B-480P-Diffusers", _IMAGE_SIZES)),
        "wan2.1-flf2v": _with_image(
            "wan2.1-flf2v",
            TOY_VAE,
            _of(
                "Wan2.1-FLF2V-14B-720P-diffusers",
                _IMAGE_SIZES,
                pos_embed_seq_len=2 * _tokens(TOY_IMAGE_ENCODER),
            ),
        ),
        "wan2.1-vace": _variant(
            "wan2.1-vace",
            TOY_VAE,
            transformer=_of("Wan2.1-VACE-1.3B-diffusers", _SIZES, vace_layers=[0, 2]),
        ),
        "wan2.2-t2v": _experts("wan2.2-t2v", _of("Wan2.2-T2V-A14B-Diffusers", _SIZES)),
        "wan2.2-i2v": _experts("wan2.2-i2v", _of("Wan2.2-I2V-A14B-Diffusers", _SIZES)),
        "wan2.2-vace": _experts(
            "wan2.2-vace", _of("Wan2.2-VACE-Fun-14B-diffusers", _SIZES, vace_layers=[0, 2])
        ),
        "wan2.2-ti2v": _variant(
            "wan2.2-ti2v", TOY_VAE_2_2, transformer=_of("Wan2.2-TI2V-5B-Diffusers", _SIZES)
        ),
        "wan2.2-animate": _with_image(
            "wan2.2-animate", _TOY_VAE_IN_A14B, _of("Wan2.2-Animate-14B-Diffusers", _ANIMATE_SIZES)
        ),
        "anyflow-wan2.1": _variant(
            "anyflow-wan2.1", TOY_VAE, transformer=_of("AnyFlow-Wan2.1-T2V-1.3B-Diffusers", _SIZES)
        ),
        "anyflow-far-wan2.1": _variant(
            "anyflow-far-wan2.1", TOY_VAE, transformer=_of("AnyFlow-FAR-Wan2.1-1.3B-Diffusers", _SIZES)
        ),
        "self-forcing-wan2.1": _variant(
            "self-forcing-wan2.1", TOY_VAE, transformer=_of("Self-Forcing-Wan2.1-1.3B", _SIZES)
        ),
        **{
            name: _variant(name, TOY_VAE, transformer=_of("Helios-Base", _SIZES, rope_dim=[8, 6, 6]))
            for name in ("helios-wan2.1", "helios-mid-wan2.1", "helios-distilled-wan2.1")
        },
    }
)
"""Configs by the variant's name in ``wanbuild.variants.table``."""


def toy_image_processor(image_encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Returns preprocessor_config.json for an image encoder with this config.

    Unlike the published one, it resizes to more than the crop, so that confusing the two sizes is visible.
    """
    size = image_encoder["image_size"]
    return {
        **PUBLISHED_IMAGE_PROCESSOR,
        "crop_size": {"height": size, "width": size},
        "size": {"shortest_edge": size + size // 8},
    }


def check_toy_configs(variant: str, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Checks that the configs, by component, fit together.

    Raises UsageError with the first field that does not fit.
    """
    vae, text = configs["vae"], configs["text_encoder"]
    z, tokens = vae["z_dim"], len(vocabulary())
    checks: list[tuple[str, Any, Any]] = []
    for name in variants()[variant].transformers:
        checks += [(f"{name} {field}", *pair) for field, *pair in _transformer_checks(variant, name, configs)]
    checks += [(f"length of vae {name}", z, len(vae[name])) for name in ("latents_mean", "latents_std")]
    for what, expected, found in checks:
        if expected != found:
            raise UsageError(
                "mismatch", f"{what} does not fit the other configs", expected=expected, found=found
            )
    if text["vocab_size"] < tokens:
        raise UsageError(
            "out_of_range",
            "text_encoder vocab_size is too small",
            expected=f"at least {tokens}",
            found=text["vocab_size"],
        )


def _transformer_checks(
    variant: str, name: str, configs: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, Any, Any]]:
    """Returns (field, expected, found) for the fields that depend on another component's config."""
    row, config, z = variants()[variant], configs[name], configs["vae"]["z_dim"]
    checks = [
        ("text_dim", configs["text_encoder"]["d_model"], config["text_dim"]),
        *((field, expected, config[field]) for field, expected, _ in row.channel_fields(z)),
        ("out_channels", z, config["out_channels"]),
    ]
    if (encoder := configs.get("image_encoder")) is not None:
        width = config["num_attention_heads"] * config["attention_head_dim"]
        positions = None if row.encoded_images == 1 else row.encoded_images * _tokens(encoder)
        checks += [
            ("image_dim", encoder["hidden_size"], config["image_dim"]),
            ("added_kv_proj_dim", width, config["added_kv_proj_dim"]),
            ("pos_embed_seq_len", positions, config.get("pos_embed_seq_len")),
        ]
    return checks
