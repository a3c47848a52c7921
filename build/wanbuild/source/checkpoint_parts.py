"""The parts of a checkpoint that may be separate files, and their options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from wanbuild.build_options import recipe_rows
from wanrun.artifact.manifest import TINY_VAE

TOKENIZER = "tokenizer"
"""The part without weights: a folder, or its tokenizer.json."""

ADDED = frozenset({TINY_VAE})
"""The parts that checkpoints lack, and that a user may add to any."""

NEEDED = ("transformer", "vae", "text_encoder", TOKENIZER)
"""The parts that every checkpoint has."""

OPTIONS: Mapping[str, str] = MappingProxyType(
    {row.name: row.flag for row in recipe_rows("convert") if row.base is Path}
)
"""The option of each part."""
