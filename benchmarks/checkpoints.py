"""Random or sparse checkpoints with published shapes, shared by the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wanbuild.published.base_configs import PUBLISHED_TEXT_ENCODER
from wanbuild.published.variant_configs import PUBLISHED_MODELS
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.toy.toy_configs import TOY_TEXT_ENCODER
from wanbuild.toy.toy_weights import Stored
from wanrun.artifact.manifest import TRANSFORMERS

MODELS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "1.3b": ("wan2.1-t2v", "Wan2.1-T2V-1.3B-Diffusers"),
        "14b": ("wan2.1-t2v", "Wan2.1-T2V-14B-Diffusers"),
        "5b": ("wan2.2-ti2v", "Wan2.2-TI2V-5B-Diffusers"),
        "a14b": ("wan2.2-t2v", "Wan2.2-T2V-A14B-Diffusers"),
        "i2v-14b": ("wan2.1-i2v", "Wan2.1-I2V-14B-480P-Diffusers"),
        "flf2v-14b": ("wan2.1-flf2v", "Wan2.1-FLF2V-14B-720P-diffusers"),
        "i2v-a14b": ("wan2.2-i2v", "Wan2.2-I2V-A14B-Diffusers"),
        "vace-1.3b": ("wan2.1-vace", "Wan2.1-VACE-1.3B-diffusers"),
        "vace-14b": ("wan2.1-vace", "Wan2.1-VACE-14B-diffusers"),
        "self-forcing-1.3b": ("self-forcing-wan2.1", "Self-Forcing-Wan2.1-1.3B"),
        "animate-14b": ("wan2.2-animate", "Wan2.2-Animate-14B-Diffusers"),
    }
)
"""By name: the variant, and the published repository with its components; text encoders have fewer layers."""


def text_encoder_config(layers: int = 1) -> dict[str, Any]:
    """Returns the config with the published width, this many layers and the toy tokenizer's vocabulary."""
    fields = {**PUBLISHED_TEXT_ENCODER, "num_layers": layers, "vocab_size": TOY_TEXT_ENCODER["vocab_size"]}
    return {name: value for name, value in fields.items() if name in TOY_TEXT_ENCODER}


def cut_transformer(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns the config with this many layers, and the control blocks that follow them."""
    fields = {**config, "num_layers": layers}
    if "vace_layers" in config:
        fields["vace_layers"] = [layer for layer in config["vace_layers"] if layer < layers]
    return fields


def ensure_checkpoint(
    folder: Path,
    model: str,
    *,
    layers: int = 1,
    sparse: bool = False,
    transformer_layers: int | None = None,
    dtype: str = "float32",
) -> Path:
    """Returns a checkpoint with two shards per component; creates it if it is missing.

    Args:
        folder: the folder of the checkpoints.
        model: one of ``MODELS``.
        layers: layers of the text encoder, which has the published width.
        sparse: write zeros as holes, which take no disk space, instead of random values.
        transformer_layers: layers of the transformers; None: as published.
        dtype: of every tensor, float32 as published.
    """
    cut = f"-{transformer_layers}-layers" if transformer_layers else ""
    checkpoint = folder / f"checkpoint-{model}{cut}{'-sparse' if sparse else ''}-{layers}"
    if dtype != "float32":
        checkpoint = checkpoint.with_name(f"{checkpoint.name}-{dtype}")
    if not checkpoint.exists():
        variant, repository = MODELS[model]
        configs = {**PUBLISHED_MODELS[repository], "text_encoder": text_encoder_config(layers)}
        if transformer_layers:
            for name in configs.keys() & TRANSFORMERS:
                configs[name] = cut_transformer(configs[name], transformer_layers)
        write_toy(checkpoint, variant, configs=configs, stored=Stored(dtype, shards=2, sparse=sparse))
    return checkpoint
