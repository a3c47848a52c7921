"""ComfyUI's all-in-one checkpoints: one safetensors file with several parts, told apart by prefixes of names.

Source: ComfyUI's supported_models.py (``unet_config`` of WAN21_T2V: ``model.diffusion_model.``,
``vae_key_prefix``, ``text_encoder_key_prefix``) and the prefixes of its older models.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from wanbuild.mapping.original import listed
from wanbuild.mapping.original_parts import EMBEDDED
from wanbuild.source.parts import OPTIONS, TOKENIZER
from wanbuild.source.safetensors import TensorFile
from wanrun.errors import SourceError

PREFIXES: tuple[tuple[str, str], ...] = (
    ("model.diffusion_model.", "transformer"),
    ("vae.", "vae"),
    ("first_stage_model.", "vae"),
    ("text_encoders.umt5xxl.transformer.", "text_encoder"),
    ("cond_stage_model.umt5xxl.transformer.", "text_encoder"),
    ("text_encoders.umt5xxl.logit_scale", ""),
    ("text_encoders.spiece_model", TOKENIZER),
    ("cond_stage_model.spiece_model", TOKENIZER),
)
"""The start of a tensor's name, and its part; empty for what no part needs. The first is also that of files
that hold a transformer alone."""

_ALONE = PREFIXES[0][0]


def _row(key: str) -> tuple[str, str] | None:
    return next((row for row in PREFIXES if key.startswith(row[0])), None)


def _several(rows: Iterable[tuple[str, str]]) -> bool:
    return any(prefix != _ALONE for prefix, _ in rows)


def prefix_of_part(keys: Iterable[str], name: str, where: Path) -> str:
    """Returns the prefix of a part's names in an all-in-one file; empty for a file of one part.

    Args:
        keys: the names of all tensors.
        name: the part; that of the low-noise expert has the prefix of a transformer.
        where: the file, for messages.

    Raises:
        SourceError: if the file holds other parts, or this one twice.
    """
    rows = dict.fromkeys(_row(key) for key in keys)
    found = [row for row in rows if row is not None]
    if not _several(found):
        return ""
    part = "transformer" if name.startswith("transformer") else name
    prefixes = [prefix for prefix, role in found if role == part]
    if len(prefixes) != 1:
        raise SourceError(
            f"{where} is an all-in-one file, and {OPTIONS[name]} is read from it",
            expected=f"one {part.replace('_', ' ')} in it",
            found=" and ".join(prefixes or sorted({role for _, role in found if role})),
            remedy="give another file",
        )
    return prefixes[0]


def all_in_one(source: str | Path | None) -> dict[str, Path]:
    """Returns the parts of an all-in-one file, each with the file itself; empty for any other source.

    Args:
        source: what the user gives as the checkpoint.

    Raises:
        SourceError: if it is one, and holds tensors that are of no known part.
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
            f"{path} is an all-in-one file with tensors of no known part: {listed(unknown)}",
            expected="names that start with " + ", ".join(prefix for prefix, _ in PREFIXES),
            remedy="give its parts by their options, which read nothing else of it: --transformer FILE "
            "--vae FILE and so on",
        )
    return {role: path for _, role in found if role in OPTIONS and role != TOKENIZER}


def holds_tokenizer(path: Path | None) -> bool:
    """Returns whether a text encoder's file holds ComfyUI's SentencePiece model, which is not read."""
    if path is None or not path.is_file():
        return False
    with TensorFile(path) as file:
        return any(key.rpartition(".")[2] in EMBEDDED for key in file.entries)
