"""The parts of a checkpoint that may be files of their own, and their options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from wanbuild.options import recipe_rows

TOKENIZER = "tokenizer"
"""The part that is no weights: a folder, or its tokenizer.json."""

NEEDED = ("transformer", "vae", "text_encoder", TOKENIZER)
"""The parts that every checkpoint has."""

OPTIONS: Mapping[str, str] = MappingProxyType(
    {row.name: row.flag for row in recipe_rows("convert") if row.base is Path}
)
"""The option of each part."""
