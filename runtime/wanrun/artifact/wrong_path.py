"""Explains a path that is not an artifact, and how to make one from it."""

from __future__ import annotations

import re
from pathlib import Path

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_CONVERT = "wanbuild convert {} --artifact DIR"
_WHOLE = f"convert the checkpoint that it belongs to: {_CONVERT.format('CHECKPOINT')}"


def wrong_path(path: Path, manifest: str) -> tuple[str, str]:
    """Returns a description of a path where an artifact was expected, and what to do."""
    if path.is_dir():
        if (path / "model_index.json").is_file():
            return "a checkpoint", f"convert it: {_CONVERT.format(path)}"
        if any(path.glob("*.safetensors")):
            return "a folder of weights", _WHOLE
        return f"no {manifest} in it", "make one with wanbuild convert"
    if path.is_file():
        if path.suffix == ".toml":
            return "a recipe", f"build it: wanbuild build {path}"
        if path.suffix == ".safetensors":
            return "a file of weights", _WHOLE
        return "a file", "make one with wanbuild convert"
    text = str(path)
    if _HUB_ID.fullmatch(text) and not Path(text).parent.exists():
        remedy = f"convert it: {_CONVERT.format(text)}; if it is an artifact already: hf://{text}"
        return "no such folder; it may be a hub id", remedy
    return "no such folder", "make one with wanbuild convert"
