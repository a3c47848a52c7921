"""Recipes: a .toml file that says how an artifact is made, for ``wanbuild build``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanrun.errors import UsageError

_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "": {"source": str, "artifact": str},
    "convert": {
        "weights_dtype": str,
        "vae_weights_dtype": str,
        "text_weights_dtype": str,
        "negative_prompt": str,
    },
    "compile": {
        "targets": list,
        "sizes": list,
        "frames": list,
        "guidance": list,
        "num_videos": int,
        "dtype": str,
        "vae_dtype": str,
        "vae_decode_chunk": int,
    },
}


@dataclass(frozen=True)
class Recipe:
    """A parsed recipe.

    Args:
        source: the checkpoint; a relative path starts at the recipe's folder.
        artifact: the artifact's folder, likewise.
        convert: options of ``wanbuild convert`` by name.
        compile: options of ``wanbuild compile`` by name.
    """

    source: Path
    artifact: Path
    convert: dict[str, Any]
    compile: dict[str, Any]


def _check(section: str, data: dict[str, Any], path: Path) -> None:
    for name, value in data.items():
        where = f"{section}.{name}" if section else name
        if section == "" and name in _FIELDS:
            continue
        kind = _FIELDS[section].get(name)
        if kind is None:
            expected = ", ".join(sorted(_FIELDS[section]))
            raise UsageError(f"{path}: unknown field {where}", expected=f"one of {expected}", found=name)
        if not isinstance(value, kind):
            raise UsageError(f"{path}: {where} has the wrong type", expected=kind, found=repr(value))


def read_recipe(path: Path) -> Recipe:
    """Reads a recipe.

    Raises:
        UsageError: if it cannot be read, lacks source or artifact, or has an unknown field.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the recipe {path} cannot be read: {error}") from None
    _check("", data, path)
    sections = {name: data.get(name, {}) for name in ("convert", "compile")}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise UsageError(f"{path}: {name} is not a table")
        _check(name, section, path)
    for name in ("source", "artifact"):
        if name not in data:
            raise UsageError(f"{path}: {name} is missing", remedy=f'add {name} = "..."')
    return Recipe(
        path.parent / data["source"], path.parent / data["artifact"], sections["convert"], sections["compile"]
    )
