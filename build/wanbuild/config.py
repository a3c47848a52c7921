"""Reads a component's config.json into a frozen dataclass, and refuses what it does not understand.

A config class lists the fields it reads as dataclass fields (a default applies where the file leaves
the field out), and two class variables:

- ``FIXED``: fields that are not read because only one value is implemented; any other value is an error;
- ``IGNORED``: fields that cannot change a result at inference.

Published files carry many fields, and one that is neither read, fixed nor ignored is an error: a
silent default is how a port goes wrong.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from wanrun.errors import SourceError


class ConfigClass(Protocol):
    """What ``parse_config`` needs of a config dataclass."""

    CLASS_NAMES: ClassVar[tuple[str, ...]]
    FIXED: ClassVar[Mapping[str, Any]]
    IGNORED: ClassVar[frozenset[str]]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


C = TypeVar("C", bound=ConfigClass)

METADATA_FIELDS = frozenset({"_class_name", "_diffusers_version", "_name_or_path", "transformers_version"})


def _coerce(value: Any, annotation: Any) -> Any:
    """Returns value as the annotated type; raises TypeError where it is not one."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        return _coerce(value, inner)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError
        items = (args[0],) * len(value) if args[1:] == (...,) else args
        if len(value) != len(items):
            raise TypeError
        return tuple(_coerce(item, kind) for item, kind in zip(value, items, strict=True))
    if annotation is float and type(value) is int:
        return float(value)
    if type(value) is not annotation or (annotation is float and not math.isfinite(value)):
        raise TypeError
    return value


def _same(value: Any, expected: Any) -> bool:
    if type(expected) is float and type(value) is int:
        return value == expected
    return type(value) is type(expected) and value == expected


def parse_config(cls: type[C], data: Mapping[str, Any], where: str) -> C:
    """Makes a config from the content of a config.json.

    Args:
        cls: a frozen dataclass with ``CLASS_NAMES``, ``FIXED`` and ``IGNORED``.
        data: the parsed JSON object.
        where: the file's name, for messages.

    Raises:
        SourceError: naming every field that is unknown, missing, of a wrong type or not supported.
    """
    problems: list[str] = []
    class_name = data.get("_class_name", next(iter(data.get("architectures") or ()), None))
    if class_name is not None and class_name not in cls.CLASS_NAMES:
        raise SourceError(
            f"{where} describes another class",
            expected=" or ".join(cls.CLASS_NAMES),
            found=class_name,
            remedy="check that the folder is a Wan checkpoint in the diffusers layout",
        )
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            try:
                values[name] = _coerce(data[name], hints[name])
            except TypeError:
                problems.append(f"{name} is {data[name]!r}, not {field.type}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{name} is missing")
    for name in sorted(data.keys() - values.keys()):
        if name in cls.FIXED:
            if not _same(data[name], cls.FIXED[name]):
                problems.append(f"{name} is {data[name]!r} and only {cls.FIXED[name]!r} is supported")
        elif not (name in cls.IGNORED or name in METADATA_FIELDS or name in fields):
            problems.append(f"unknown field {name} = {data[name]!r}")
    if problems:
        raise SourceError(
            f"{where} is not understood: {', '.join(problems)}",
            remedy="a field that may change the result is never ignored; use a published checkpoint",
        )
    return cls(**values)


def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dict of a JSON object's members (json's ``object_pairs_hook``).

    Raises:
        ValueError: if a name occurs twice: readers differ in which value they take.
    """
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"duplicate name {', '.join(map(repr, twice[:3]))}")
    return members


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        SourceError: if the file is missing, is not JSON, has a name twice in one object, or is not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_object)
    except FileNotFoundError:
        raise SourceError(f"{path} is missing", remedy="check the source folder is complete") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read as JSON: {error}", remedy="download it again") from None
    if not isinstance(data, dict):
        raise SourceError(f"{path} is not a JSON object", found=type(data).__name__)
    return data
