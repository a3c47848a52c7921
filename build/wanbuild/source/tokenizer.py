"""Reads a checkpoint's tokenizer folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanbuild.config import read_json
from wanrun.errors import SourceError


@dataclass(frozen=True)
class SourceTokenizer:
    """A tokenizer folder, whose tokenizer.json (``file``) is the only file that the runtime needs.

    ``vocab_size`` is one past the largest id.
    """

    folder: Path
    file: Path
    pad_id: int
    eos_id: int
    vocab_size: int


def _token_name(config: Mapping[str, Any], field: str, default: str) -> str:
    token = config.get(field, default)
    # A token with options is stored as an object.
    return str(token.get("content", default) if isinstance(token, dict) else token)


def open_tokenizer(place: Path) -> SourceTokenizer:
    """Reads the ids from tokenizer.json; the ``tokenizers`` package interprets the rest at run time.

    ``place`` is the file or its folder. Raises SourceError if the files are missing or not JSON, the
    tokenizer is not a Unigram tokenizer with a padding and an end token, or it pads on the left.
    """
    file = place if place.suffix == ".json" else place / "tokenizer.json"
    folder = file.parent
    data = read_json(file)
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if os.path.lexists(config_file) else {}  # a dangling link is an error
    model, added = data.get("model"), data.get("added_tokens", [])
    vocab = model.get("vocab") if isinstance(model, dict) else None
    try:
        if not isinstance(vocab, list):
            raise TypeError("model.vocab is not a list, as a Unigram model's is")
        ids = {str(piece): index for index, (piece, _) in enumerate(vocab)}
        ids |= {token["content"]: int(token["id"]) for token in added}
        pad, eos = (ids[_token_name(config, *t)] for t in (("pad_token", "<pad>"), ("eos_token", "</s>")))
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(
            "unreadable",
            f"{file} is not understood: {error}",
            expected="a Unigram tokenizer with a padding and an end token",
            remedy="use the published checkpoint's tokenizer folder",
        ) from None
    if config.get("padding_side", "right") != "right":
        raise SourceError(
            "mismatch",
            f"{config_file} pads on another side",
            expected="right",
            found=str(config["padding_side"])[:80],
        )
    return SourceTokenizer(folder, file, pad, eos, max(ids.values()) + 1)
