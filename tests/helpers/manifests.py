"""Manifests that say no more than a test needs."""

from __future__ import annotations

from typing import Any

from wanrun.artifact.layout import plan_layout
from wanrun.artifact.manifest import Manifest, Tokenizer
from wanrun.artifact.parameters import Parameter
from wanrun.artifact.programs import ProfileOptions


def plain_manifest(**fields: Any) -> Manifest:
    """A manifest of nothing but these fields."""
    tokenizer = Tokenizer(file="tokenizer.json", sha256="", max_length=512, pad_id=0)
    nothing: dict[str, Any] = {
        "model": {},
        "configs": {},
        "source": {"files": {}},
        "dtypes": {},
        "components": {},
        "tokenizer": tokenizer,
        "loras": (),
        **{name: {} for name in ("profiles", "targets", "golden", "embeddings", "tool", "times")},
    }
    return Manifest(**{**nothing, **fields})


def plain_parameter(shape: tuple[int, ...], dtype: str) -> Parameter:
    """A parameter whose checksums nobody reads."""
    layout = plan_layout(shape, dtype, stacked=False)
    return Parameter(layout, ("00000000",) * layout.rows, "")


def built_with(**options: Any) -> ProfileOptions:
    """Options of a profile, the defaults of ``wanbuild compile`` where none are given."""
    defaults: dict[str, Any] = {
        "dtype": "bfloat16",
        "vae_dtype": "float32",
        "scheduler_dtype": "float32",
        "vae_decode_chunk": 1,
        "vae_encode_chunk": 1,
        "loop": "both",
        "max_steps": 100,
        "weights_dtype": "bfloat16",
        "text_weights_dtype": "bfloat16",
        "vae_weights_dtype": "float32",
    }
    return ProfileOptions(**{**defaults, **options})
