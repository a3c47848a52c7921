"""Random or sparse checkpoints of real shapes, which the benchmarks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wanbuild.published import PUBLISHED_TEXT_ENCODER, PUBLISHED_TRANSFORMERS, PUBLISHED_VAE
from wanbuild.toy import TOY_TEXT_ENCODER, write_toy


def text_encoder_config(layers: int = 1) -> dict[str, Any]:
    """The published width with this many layers, and the toy tokenizer's vocabulary."""
    fields = {**PUBLISHED_TEXT_ENCODER, "num_layers": layers, "vocab_size": TOY_TEXT_ENCODER["vocab_size"]}
    return {name: value for name, value in fields.items() if name in TOY_TEXT_ENCODER}


def ensure_checkpoint(folder: Path, model: str, *, layers: int = 1, sparse: bool = False) -> Path:
    """A float32 checkpoint in two shards a component, made unless it is there.

    Args:
        folder: where checkpoints are kept.
        model: ``1.3b`` or ``14b``, with the published transformer and VAE.
        layers: of the text encoder, which otherwise has the published width.
        sparse: all zeros in holes, which take no room, instead of random values.
    """
    checkpoint = folder / f"checkpoint-{model}{'-sparse' if sparse else ''}-{layers}"
    if not checkpoint.exists():
        write_toy(
            checkpoint,
            "wan2.1-t2v",
            transformer=PUBLISHED_TRANSFORMERS[f"wan2.1-t2v-{model}"],
            vae=PUBLISHED_VAE,
            text_encoder=text_encoder_config(layers),
            shards=2,
            sparse=sparse,
        )
    return checkpoint
