"""The parts of a checkpoint that may be files of their own, and their options."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from wanbuild.source.experts import LOW_NOISE
from wanbuild.variants.variant import IMAGE_ENCODER

TOKENIZER = "tokenizer"
"""The part that is no weights: a folder, or its tokenizer.json."""

NEEDED = ("transformer", "vae", "text_encoder", TOKENIZER)
"""The parts that every checkpoint has."""

OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        name: f"--{name.replace('_', '-')}"
        for name in ("transformer", LOW_NOISE, "vae", "text_encoder", IMAGE_ENCODER, TOKENIZER)
    }
)
"""The option of each part."""
