"""ComfyUI's all-in-one checkpoints: one safetensors file with several parts, told apart by their prefixes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from wanbuild.mapping.original import listed
from wanbuild.mapping.original_parts import EMBEDDED
from wanbuild.mapping.prefixes import PREFIXES
from wanbuild.source.checkpoint_parts import OPTIONS, TOKENIZER
from wanbuild.source.experts import LOW_NOISE
from wanbuild.source.safetensors import TensorFile
from wanrun.errors import SourceError


def _row(key: str) -> tuple[str, str] | None:
    return next((row for row in PREFIXES.items() if key.startswith(row[0])), None)


def _several(rows: Iterable[tuple[str, str]]) -> bool:
    return any(part != "transformer" for _, part in rows)


def prefix_of_part(keys: Iterable[str], name: str, where: Path) -> str:
    """Returns the prefix of a part's names in an all-in-one file with tensors ``keys``; empty in other files.

    A low-noise expert's part has the prefix of a transformer. Raises SourceError if the file holds only other
    parts, or this one twice.
    """
    rows = dict.fromkeys(_row(key) for key in keys)
    found = [row for row in rows if row is not None]
    if not _several(found):
        return ""
    part = "transformer" if name == LOW_NOISE else name
    prefixes = [prefix for prefix, role in found if role == part]
    if len(prefixes) > 1:  # a short one may be the start of any name
        prefixes = [prefix for prefix in prefixes if prefix != "model."]
    if len(prefixes) != 1:
        raise SourceError(
            "wrong_kind",
            f"{where} is an all-in-one file, and {OPTIONS[name]} is read from it",
            expected=f"one {part.replace('_', ' ')} in it",
            found=" and ".join(prefixes or sorted({role for _, role in found if role})),
            remedy="give another file",
        )
    return prefixes[0]


def all_in_one(source: str | Path | None) -> dict[str, Path]:
    """Returns the parts of an all-in-one file, each with the file itself; empty for any other source.

    Raises SourceError if the file has tensors of no known part.
    """
    path = Path(source) if source is not None else None
    if path is None or path.suffix != ".safetensors" or not path.is_file():
        return {}
    with TensorFile(path) as file:
        rows = {key: _row(key) for key in file.entries}
    found = [row for row in rows.values() if row is not None]
    if not _several(found):
        return {}
    if unknown := [key for key, row in rows.items() if row is None]:
        raise SourceError(
            "wrong_kind",
            f"{path} is an all-in-one file with tensors of no known part: {listed(unknown)}",
            expected="names that start with " + ", ".join(PREFIXES),
            remedy="give its parts by their options, which read nothing else of it: --transformer FILE "
            "--vae FILE and so on",
        )
    return {role: path for _, role in found if role in OPTIONS and role != TOKENIZER}


def holds_tokenizer(path: Path | None) -> bool:
    """Returns whether a text encoder's file holds ComfyUI's SentencePiece model, which is not read."""
    if path is None or path.suffix != ".safetensors" or not path.is_file():
        return False
    with TensorFile(path) as file:
        return any(key.rpartition(".")[2] in EMBEDDED for key in file.entries)
