"""The prefixes that programs put before the names of a part's tensors.

Sources: ComfyUI's supported_models.py (``unet_config`` of WAN21_T2V: ``model.diffusion_model.``,
``vae_key_prefix``, ``text_encoder_key_prefix``) and the prefixes of its older models; files of PEFT, and
diffusers' LoRAs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

PREFIXES: Mapping[str, str] = MappingProxyType(
    {
        "base_model.model.": "transformer",
        "model.diffusion_model.": "transformer",
        "diffusion_model.": "transformer",
        "transformer.": "transformer",
        "model.": "transformer",
        "vae.": "vae",
        "first_stage_model.": "vae",
        "text_encoders.umt5xxl.transformer.": "text_encoder",
        "cond_stage_model.umt5xxl.transformer.": "text_encoder",
        "text_encoders.umt5xxl.logit_scale": "",
        "text_encoders.spiece_model": "tokenizer",
        "cond_stage_model.spiece_model": "tokenizer",
    }
)
"""The part of each; empty for what no part needs. A prefix comes before a shorter one that it begins with."""

TRANSFORMER = tuple(prefix for prefix, part in PREFIXES.items() if part == "transformer")
"""Those of the transformer, which is also a file of its own under one of them."""


def common_prefix(keys: Iterable[str]) -> str:
    """Returns the one of ``TRANSFORMER`` that every key starts with; empty if there is none."""
    keys = tuple(keys)
    return next((prefix for prefix in TRANSFORMER if all(key.startswith(prefix) for key in keys)), "")
