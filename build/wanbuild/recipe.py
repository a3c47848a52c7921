"""Reads recipes: .toml files with the source and the options of an artifact, for ``wanbuild build``."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wanbuild.hub.repository import is_hub_id
from wanbuild.lora.merge import parse_lora
from wanbuild.source.configs import parse_configs
from wanbuild.source.parts import OPTIONS
from wanbuild.targets.mesh import parse_mesh
from wanrun import __version__
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.roles import LOOPS
from wanrun.errors import ArtifactError, UsageError, escaped, shortened
from wanrun.files import canonical_json, read_bounded, sha256_of
from wanrun.request.written import parse_size

FIELDS: Mapping[str, Mapping[str, type]] = MappingProxyType(
    {
        "": {"source": str, "artifact": str},
        "convert": {
            "weights_dtype": str,
            "vae_weights_dtype": str,
            "text_weights_dtype": str,
            "negative_prompt": str,
            "revision": str,
            "lora": str,
            "lora_high": str,
            "lora_low": str,
            "config": str,
            "sampling": str,
            "quantise": str,
            "keep": str,
            **dict.fromkeys(OPTIONS, str),
        },
        "convert.defaults": {
            "steps": int,
            "guidance_scale": float,
            "guidance_scale_2": float,
            "boundary": float,
            "flow_shift": float,
            "solver": str,
            "timesteps": float,
            "fps": float,
        },
        "compile": {
            "targets": str,
            "sizes": str,
            "frames": int,
            "guidance": bool,
            "num_videos": int,
            "num_references": int,
            "dtype": str,
            "vae_dtype": str,
            "vae_precision": str,
            "scheduler_dtype": str,
            "vae_decode_chunk": int,
            "vae_encode_chunk": int,
            "loop": str,
            "max_steps": int,
            "mesh": str,
            "proxies": bool,
        },
    }
)
"""The fields of each section, with the type of the value or of each item of a list."""

MAX_BYTES = 2**20
"""The largest recipe."""

MOST = 2**31 - 1
"""The largest integer; what uses it has a limit of its own."""

DTYPES = ("bfloat16", "float32")
CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "loop": LOOPS,
        "quantise": ("int8", "float8", "source"),
        "vae_precision": ("high", "highest"),
    }
)
_LORAS = ("lora", "lora_high", "lora_low")
_LISTS = frozenset({"targets", "sizes", "frames", "guidance", "timesteps", "keep", *_LORAS})


@dataclass(frozen=True)
class Recipe:
    """A parsed recipe.

    Args:
        source: the checkpoint's folder, relative to the recipe's folder; or a hub id, if the text has this
            form and the recipe's folder has nothing of this name; None: single files are all there is.
        artifact: the artifact's folder; it, the LoRAs and single files are relative to the recipe's folder
            too.
        convert: options of ``wanbuild convert`` by name; ``defaults`` and ``configs`` are dicts by name.
        compile: options of ``wanbuild compile`` by name.
    """

    source: str | None
    artifact: Path
    convert: dict[str, Any]
    compile: dict[str, Any]

    @property
    def parts(self) -> dict[str, Path]:
        """The single files by component."""
        return {name: self.convert[name] for name in OPTIONS if name in self.convert}

    @property
    def configs(self) -> dict[str, Path]:
        """The given config files by part."""
        return dict(self.convert.get("configs", {}))


def _check(section: str, data: dict[str, Any], path: Path) -> None:
    for name, value in data.items():
        where = f"{section}.{shortened(name)[1:-1]}" if section else shortened(name)[1:-1]
        if section == "" and name in FIELDS:
            continue
        kind = FIELDS[section].get(name)
        if kind is None:
            expected = ", ".join(sorted(FIELDS[section]))
            raise UsageError(f"{path}: unknown field {where}", expected=f"one of {expected}")
        items = value if isinstance(value, list) else [value]
        if any(type(item) is int and abs(item) > MOST for item in items):
            raise UsageError(f"{path}: {where} is out of range", expected=f"{MOST} at most")
        found = shortened(str(value))
        if kind is float:
            items = [float(item) if type(item) is int else item for item in items]
        if isinstance(value, list) != (name in _LISTS) or any(type(item) is not kind for item in items):
            expected = f"a list of {kind.__name__}" if name in _LISTS else kind.__name__
            raise UsageError(f"{path}: {where} has the wrong type", expected=expected, found=found)
        if any("\0" in item if kind is str else not math.isfinite(item) for item in items):
            expected = "text without NUL" if kind is str else "finite numbers"
            raise UsageError(f"{path}: {where} cannot be used", expected=expected, found=found)
        if not items or any(type(item) is int and item < 1 for item in items):
            raise UsageError(f"{path}: {where} is out of range", expected="1 or more", found=found)
        known = DTYPES if name.endswith("dtype") else CHOICES.get(name)
        if known is not None and value not in known:
            raise UsageError(f"{path}: {where} is unknown", expected=" or ".join(known), found=found)


def _check_paths(data: Mapping[str, Any], convert: Mapping[str, Any], path: Path) -> None:
    """Raises UsageError for a text that can be no path, such as one that is too long for the system."""
    named = {name: [data[name]] for name in ("source", "artifact") if name in data}
    named |= {name: [convert[name]] for name in OPTIONS if name in convert}
    named |= {name: convert.get(name, []) for name in _LORAS}
    for name, texts in named.items():
        for text in texts:
            try:
                os.lstat(path.parent / text)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                continue
            except OSError as error:
                raise UsageError(f"{path}: {name} names no path", found=error.strerror) from None


def _size(text: str, path: Path) -> tuple[int, int]:
    try:
        return parse_size(text)
    except UsageError as error:
        raise UsageError(f"{path}: compile.sizes: {error}") from None


def _mesh(text: str, path: Path) -> dict[str, int]:
    try:
        return parse_mesh(text)
    except UsageError as error:
        raise UsageError(f"{path}: compile.mesh: {error}") from None


def _configs(text: str, path: Path) -> dict[str, Path]:
    try:
        return parse_configs([text], path.parent)
    except UsageError as error:
        raise UsageError(f"{path}: convert.config: {error}") from None


def read_recipe(path: Path) -> Recipe:
    """Reads a recipe.

    Raises:
        UsageError: if the recipe cannot be read, lacks source or artifact, or has a field that is unknown, of
            a wrong type or out of range.
    """
    try:
        data = tomllib.loads(read_bounded(path, MAX_BYTES).decode("utf-8"))
    # A number of 5000 digits is a ValueError too, and so are a NUL in a path and bytes that are no text.
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the recipe {escaped(str(path))} cannot be read: {error}") from None
    _check("", data, path)
    sections: dict[str, Any] = {}
    for name in ("convert", "convert.defaults", "compile"):
        parent, _, key = name.rpartition(".")
        sections[name] = (sections[parent] if parent else data).pop(key, {})
        if not isinstance(sections[name], dict):
            raise UsageError(f"{path}: {name} is not a table")
    for name, section in sections.items():
        _check(name, section, path)
    alone = "transformer" in sections["convert"]
    for name in ("artifact",) if alone else ("source", "artifact"):
        if name not in data:
            raise UsageError(f"{path}: {name} is missing", remedy=f'add {name} = "..."')
    _check_paths(data, sections["convert"], path)
    if "sizes" in sections["compile"]:
        sections["compile"]["sizes"] = [_size(text, path) for text in sections["compile"]["sizes"]]
    if "mesh" in sections["compile"]:
        sections["compile"]["mesh"] = _mesh(sections["compile"]["mesh"], path)
    for name in _LORAS:
        if name in sections["convert"]:
            sections["convert"][name] = [str(path.parent / text) for text in sections["convert"][name]]
    if sections["convert.defaults"]:
        sections["convert"]["defaults"] = sections["convert.defaults"]
    if sections["convert"].get("sampling", "").endswith(".toml"):
        sections["convert"]["sampling"] = str(path.parent / sections["convert"]["sampling"])
    for name in OPTIONS:
        if name in sections["convert"]:
            sections["convert"][name] = _place(sections["convert"][name], path.parent)
    if "config" in sections["convert"]:
        sections["convert"]["configs"] = _configs(sections["convert"].pop("config"), path)
    source = data.get("source")
    source = None if source is None else str(_place(source, path.parent))
    artifact = path.parent / data["artifact"]
    if ".." in artifact.parts:  # of which some may not be there before the conversion
        artifact = artifact.resolve()
    return Recipe(source, artifact, sections["convert"], sections["compile"])


def _place(text: str, folder: Path) -> Path:
    """Returns a path relative to the recipe's folder; a text that has the form of a hub id stays as it is, if
    there is no such path."""
    return folder / text if (folder / text).exists() or not is_hub_id(text) else Path(text)


def fingerprint(recipe: Recipe) -> str:
    """Returns the digest of everything that a build from a recipe depends on.

    These are the recipe, the names, sizes and times of its files, and the versions of this tool and of JAX.
    For a hub's repository it is the revision in the recipe: name a commit, or changes on the hub go unseen.
    """
    configs = {"configs": _texts(recipe.configs)} if recipe.configs else {}
    facts = {
        "recipe": {
            "source": recipe.source,
            "convert": {**recipe.convert, **_texts(recipe.parts), **configs},
            "compile": recipe.compile,
        },
        "files": [one for path in _files(recipe) for one in _state(path)],
        "versions": {"wanbuild": __version__, "jax": version("jax")},
    }
    return sha256_of(canonical_json(facts))


def _texts(paths: Mapping[str, Path]) -> dict[str, str]:
    return {name: str(path) for name, path in paths.items()}


def _files(recipe: Recipe) -> Iterator[Path]:
    """Yields the source, if it is here, single files, configs, and the LoRAs, without their scales."""
    if recipe.source is not None:
        yield Path(recipe.source)
    yield from (*recipe.parts.values(), *recipe.configs.values())
    yield from (Path(text) for text in [recipe.convert.get("sampling", "")] if text.endswith(".toml"))
    for name in _LORAS:
        yield from (Path(parse_lora(text)[0]) for text in recipe.convert.get(name, ()))


def _state(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yields the name, the size and the time of a file, or of a checkpoint's files, without the hub's own."""
    files = sorted((*path.glob("*"), *path.glob("*/*"))) if path.is_dir() else [path]
    for file in files:
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
            found = file.stat()
            yield str(file), found.st_size, found.st_mtime_ns


def is_built(artifact: Path, digest: str) -> bool:
    """Returns whether an artifact is the result of a build with this fingerprint."""
    try:
        return read_manifest(artifact).tool.get(_MARK) == digest
    except ArtifactError:
        return False


def mark_built(artifact: Path, digest: str) -> None:
    """Writes a build's fingerprint into the manifest of its artifact."""
    manifest = read_manifest(artifact)
    manifest.changed(tool={**manifest.tool, _MARK: digest}).write(artifact)


_MARK = "recipe"
"""The fingerprint's name in the manifest's ``tool``."""
