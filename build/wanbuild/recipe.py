"""Reads recipes: .toml files with the source and the options of an artifact, for ``wanbuild build``."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from wanbuild.build_options import recipe_rows
from wanbuild.convert_options import default_rows
from wanbuild.hub.repository import is_hub_id
from wanbuild.lora.merge import parse_lora_file
from wanbuild.source.checkpoint_parts import OPTIONS
from wanbuild.source.configs import parse_configs
from wanrun import __version__
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import ArtifactError, UsageError, escaped, shortened
from wanrun.files import canonical_json, read_bounded, sha256_of
from wanrun.request.prompts_file import key_of
from wanrun.rows import Row

Text = Annotated[str, Meta(pattern=r"\A[^\0]*\Z")]  # without NUL
MOST = 2**31 - 1
"""The largest integer."""

Number = Annotated[int, Meta(ge=-MOST - 1, le=MOST)] | Annotated[float, Meta(ge=-1e300, le=1e300)]
"""A finite number or integer. What uses it has further limits."""

_NUMBERS: Mapping[type[Any], Any] = MappingProxyType({bool: bool, float: Number})


def _written(row: Row) -> Any:
    """Returns the type of an option's value in a recipe. Whatever uses the value has further limits."""
    kind: Any = _NUMBERS.get(row.base, Text)
    if row.base is int:
        kind = Annotated[int, Meta(ge=-MOST if row.bounds[0] is None else row.bounds[0], le=MOST)]
    several = row.many or row.numbers
    return Annotated[list[kind], Meta(min_length=1)] if several else kind


def _section(name: str, rows: Iterable[Row], inner: Mapping[str, Any] = MappingProxyType({})) -> type[Struct]:
    """Returns the type of a section: its options and the sections inside it."""
    kinds = {**{row.key: _written(row) for row in rows}, **inner}
    fields = [(key, kind | None, None) for key, kind in kinds.items()]
    return msgspec.defstruct(name, fields, forbid_unknown_fields=True)


_DEFAULTS = _section("Defaults", default_rows().values())
_SECTIONS: Mapping[str, type[Struct]] = MappingProxyType(
    {
        "convert": _section("Convert", recipe_rows("convert"), {"defaults": _DEFAULTS}),
        "compile": _section("Compile", recipe_rows("compile")),
    }
)
_FIELDS: tuple[tuple[str, Any] | tuple[str, Any, Any], ...] = (
    ("artifact", Text),
    ("source", Text | None, None),
    *((name, section | None, None) for name, section in _SECTIONS.items()),
)
_FILE = msgspec.defstruct("File", _FIELDS, forbid_unknown_fields=True)
"""A recipe's fields and sections."""

MAX_BYTES = 2**20
"""The largest recipe."""

_LORAS = ("lora", "lora_high", "lora_low")


@dataclass(frozen=True)
class Recipe:
    """A parsed recipe, with its paths joined to the recipe's folder.

    Attributes:
        source: the checkpoint's folder, or a hub id if the text has that form and no such folder exists; None
            if single files hold every component.
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


def _check_paths(data: Mapping[str, Any], convert: Mapping[str, Any], path: Path) -> None:
    """Raises UsageError for a text that the system refuses as a path, such as one that is too long."""
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
                raise UsageError(
                    "missing_parameter", f"{path}: {name} names no path", found=error.strerror
                ) from None


def _read(section: dict[str, Any], name: str, path: Path) -> None:
    """Checks a section's values that are choices, and parses those that have a syntax."""
    for row in recipe_rows(name):
        value = section.get(row.key)
        if value is None:
            continue
        texts = value if row.many else [value]
        try:
            read = texts if row.parse is None else [row.parse(text) for text in texts]
        except UsageError as error:
            raise UsageError("invalid_value", f"{path}: {name}.{row.key}: {error}") from None
        if wrong := [text for text in read if row.choices and text not in row.choices]:
            what = f"{path}: {name}.{row.key} cannot be {shortened(wrong[0])}"
            raise UsageError("invalid_value", what, expected=row.expected)
        section[row.key] = read if row.many else read[0]


def _configs(text: str, path: Path) -> dict[str, Path]:
    try:
        return parse_configs([text], path.parent)
    except UsageError as error:
        raise error.located(f"{path}: convert.config") from None


def read_recipe(path: Path) -> Recipe:
    """Reads a recipe; raises UsageError if it cannot, or for any field that is missing, unknown or wrong."""
    try:
        data = tomllib.loads(read_bounded(path, MAX_BYTES).decode("utf-8-sig"))
    # A number of 5000 digits is a ValueError too, and so are a NUL in a path and bytes that are not text.
    except (OSError, ValueError, RecursionError) as error:
        checkpoint = f"a checkpoint is for wanbuild convert {path} --artifact DIR"
        raise UsageError(
            "unreadable",
            f"the recipe {escaped(str(path))} cannot be read: {error}",
            remedy=None if path.suffix == ".toml" else checkpoint,
        ) from None
    try:
        msgspec.convert(data, _FILE)
    except msgspec.ValidationError as error:
        said = escaped(str(error)[:300])
        raise UsageError(
            "unreadable", f"{path} is not a valid recipe: {said}", remedy="docs/recipes.md has its fields"
        ) from None
    convert, compiled = data.get("convert", {}), data.get("compile", {})
    if "source" not in data and "transformer" not in convert:
        raise UsageError("missing_parameter", f"{path}: source is missing", remedy='add source = "..."')
    _check_paths(data, convert, path)
    _read(convert, "convert", path)
    _read(compiled, "compile", path)
    for name in _LORAS:
        if name in convert:
            convert[name] = [str(path.parent / text) for text in convert[name]]
    if convert.get("sampling", "").endswith(".toml"):
        convert["sampling"] = str(path.parent / convert["sampling"])
    for name in OPTIONS:
        if name in convert:
            convert[name] = _place(convert[name], path.parent)
    if not convert.get("defaults", True):  # an empty section is like none
        del convert["defaults"]
    if "config" in convert:
        convert["configs"] = _configs(convert.pop("config"), path)
    source = data.get("source")
    source = None if source is None else str(_place(source, path.parent))
    artifact = path.parent / data["artifact"]
    if ".." in artifact.parts:  # some of them may not exist before the conversion
        artifact = artifact.resolve()
    return Recipe(source, artifact, convert, compiled)


def _place(text: str, folder: Path) -> Path:
    """Returns a path relative to the recipe's folder; a hub id stays, if there is no such path."""
    return folder / text if (folder / text).exists() or not is_hub_id(text) else Path(text)


@contextmanager
def options_of(path: Path) -> Iterator[None]:
    """Makes a UsageError about a profile's option, raised inside the block, name the recipe and its key."""
    try:
        yield
    except UsageError as error:
        if not error.fields:
            raise
        raise UsageError(error.code, f"{path}: {error.spelled(_key_of)}") from None


def _key_of(name: str) -> str:
    """Returns a profile option's key in a recipe: ``size`` of one profile is ``sizes`` there."""
    flag = f"--{key_of(name).replace('_', '-')}"
    found = (row for row in recipe_rows("compile") if name == row.name or flag == row.flag)
    return next((f"compile.{row.key}" for row in found), name)


MEANING = 2
"""The version of recipes' meaning, raised when a recipe makes another artifact than before: 2 since a missing
shift is 1, and ``dmd``."""


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
        "versions": {"wanbuild": __version__, "jax": version("jax"), "meaning": MEANING},
    }
    return sha256_of(canonical_json(facts))


def _texts(paths: Mapping[str, Path]) -> dict[str, str]:
    return {name: str(path) for name, path in paths.items()}


def _files(recipe: Recipe) -> Iterator[Path]:
    """Yields the source, if it is here, single files, configs, and the LoRAs, without their scales."""
    if recipe.source is not None:
        yield Path(recipe.source)
    for path in (*recipe.parts.values(), *recipe.configs.values()):
        yield path.parent if path.name.endswith(".index.json") else path  # with the shards
    yield from (Path(text) for text in [recipe.convert.get("sampling", "")] if text.endswith(".toml"))
    for name in _LORAS:
        yield from (Path(parse_lora_file(text)[0]) for text in recipe.convert.get(name, ()))


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
