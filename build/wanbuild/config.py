"""Reads a component's config.json into a frozen dataclass, and refuses unknown fields and values.

A config class lists the fields that it reads as dataclass fields (a default applies if the file lacks
the field; types such as ``Size`` and ``Number`` bound the values), and three class variables:

- ``CLASS_NAMES``: the names of the classes whose configs it reads;
- ``FIXED``: fields that are not read because only one value is implemented; any other value is an error;
- ``IGNORED``: fields that cannot change a result at inference.

Published files have many fields. A field that is neither read, fixed nor ignored is an error, because a
silent default could change a result unnoticed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import msgspec
from msgspec import Meta

from wanrun.errors import SourceError
from wanrun.files import UnusableFileError, open_regular


class ConfigClass(Protocol):
    """The class variables that ``parse_config`` needs in a config dataclass."""

    CLASS_NAMES: ClassVar[tuple[str, ...]]
    FIXED: ClassVar[Mapping[str, Any]]
    IGNORED: ClassVar[frozenset[str]]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


C = TypeVar("C", bound=ConfigClass)


class ConfigError(SourceError):
    """An error with one text per problem: a config's fields contradict each other or describe no known model.

    A config class raises it from its constructor; ``parse_config`` turns it into a SourceError that names the
    file.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("mismatch", f"the config does not fit together: {', '.join(problems)}")


METADATA_FIELDS = frozenset(
    {
        *("_class_name", "_diffusers_version", "_name_or_path", "transformers_version"),
        "_attn_implementation_autoset",  # transformers 4.46 to 4.52: how the attention's form was chosen
    }
)

MAX_SIZE = 2**20
"""The largest integer that a config field may have: four times the largest published one, a vocabulary."""

MAX_NUMBER = 1e6
"""The largest magnitude of a config's floating-point number. Models compute in float32 and bfloat16."""

Size = Annotated[int, Meta(ge=1, le=MAX_SIZE)]
Index = Annotated[int, Meta(ge=0, le=MAX_SIZE)]
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Divisor = Annotated[float, Meta(ge=1e-12, le=MAX_NUMBER)]
"""A divisor or a number under a root, such as an epsilon or a standard deviation: zero would give NaN."""

MAX_JSON_BYTES = 256 * 2**20
"""The largest JSON file that is read: more than ten times the largest published one, a tokenizer."""

MAX_DEPTH = 32
"""The most levels of nesting in a config, which is copied into the manifest."""

MAX_NAME = 1000
"""The most characters in the name of a JSON object's member, for example a tensor's name."""


_INFINITIES = ("Infinity", "-Infinity")


def shown(value: Any, limit: int = 80) -> str:
    """Returns a value's text for a message, cut after ``limit`` characters to keep the line readable."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _same(value: Any, expected: Any) -> bool:
    if type(expected) is float and type(value) is int:
        return value == expected
    if value in _INFINITIES:
        value = float(value)
    return type(value) is type(expected) and value == expected


def _depth(value: Any) -> int:
    """Returns a value's levels of nesting, counted up to ``MAX_DEPTH`` + 1."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        containers = [item.values() if isinstance(item, dict) else item for item in level]
        level = [inner for items in containers for inner in items if isinstance(inner, dict | list)]
        depth += 1
    return depth


def class_name_of(data: Mapping[str, Any]) -> Any:
    """Returns the class that a config names, in diffusers' or transformers' form; None if it names none."""
    architectures = data.get("architectures")
    if isinstance(architectures, list):
        architectures = architectures[0] if architectures else None
    return data.get("_class_name", architectures)


def parse_config(cls: type[C], data: Mapping[str, Any], where: str) -> C:
    """Makes a config, an instance of ``cls``, from the content of a config.json; ``where`` names the file.

    Raises SourceError for another class or too deep nesting, with every field that is unknown, missing, of a
    wrong type or unsupported, or with the fields that contradict each other.
    """
    problems: list[str] = []
    class_name = class_name_of(data)
    if _depth(data) > MAX_DEPTH:
        raise SourceError("unreadable", f"{where} is nested too deep", expected=f"at most {MAX_DEPTH} levels")
    if class_name is not None and class_name not in cls.CLASS_NAMES:
        raise SourceError(
            "wrong_kind",
            f"{where} describes another class",
            expected=" or ".join(cls.CLASS_NAMES),
            found=shown(class_name),
            remedy="check that the folder is a Wan checkpoint in the diffusers layout",
        )
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            try:
                values[name] = msgspec.convert(data[name], hints[name])
            except msgspec.ValidationError as error:
                problems.append(f"{name} is {shown(data[name])}: {error}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{name} is missing")
    for name in sorted(data.keys() - values.keys()):
        if name in cls.FIXED:
            if not _same(data[name], cls.FIXED[name]):
                problems.append(f"{name} is {shown(data[name])} and only {cls.FIXED[name]!r} is supported")
        elif not (name in cls.IGNORED or name in METADATA_FIELDS or name in fields):
            problems.append(f"unknown field {name} = {shown(data[name])}")
    if problems:
        raise SourceError(
            "unreadable",
            f"{where} is not understood: {', '.join(problems)}",
            remedy="a field that may change the result is never ignored; use a published checkpoint",
        )
    try:
        return cls(**values)
    except ConfigError as error:
        raise SourceError(
            "mismatch",
            f"{where} does not fit together: {', '.join(error.problems)}",
            remedy="use the config.json that was published with these weights",
        ) from None


def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dict of a JSON object's members (json's ``object_pairs_hook``).

    Raises ValueError if a name occurs twice, because readers differ in which value they take; or if a name is
    too long or has an unprintable character, because messages show names.
    """
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"duplicate name {', '.join(map(shown, twice[:3]))}")
    for name in members:
        if len(name) > MAX_NAME or not name.isprintable():
            raise ValueError(f"a name that is too long or not printable, {shown(name, 40)}")
    return members


def _finite_float(text: str) -> float | str:
    """Returns the number, or the text itself if the number is too large for a float."""
    value = float(text)
    return value if math.isfinite(value) else text


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Returns a regular file's content.

    Raises SourceError if the file is missing, unreadable, larger than ``limit`` bytes, or not regular (a pipe
    may never end).
    """
    try:
        with open_regular(path, limit) as file:
            return file.read(limit)
    except FileNotFoundError:
        raise SourceError(
            "missing_file", f"{path} is missing", remedy="check the source folder is complete"
        ) from None
    except UnusableFileError as error:
        raise SourceError(
            "unreadable", f"{path} cannot be read: {error}", remedy="download it again"
        ) from None
    except OSError as error:
        raise SourceError(
            "unreadable",
            f"{path} cannot be read: {error.strerror}",
            remedy="check that it is a readable file",
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object; raises SourceError if it cannot, or for a name that ``unique_object`` refuses.

    JSON has no infinity and no NaN, but Python reads and writes them: diffusers saves ``-Infinity`` in the
    configs of some schedulers. Here they stay text, so no number field can have one of these values.
    """
    raw = read_bytes(path)
    try:
        data = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=unique_object,
            parse_constant=str,
            parse_float=_finite_float,
        )
    except (ValueError, RecursionError) as error:
        raise SourceError(
            "unreadable", f"{path} cannot be read as JSON: {error}", remedy="download it again"
        ) from None
    if not isinstance(data, dict):
        raise SourceError("unreadable", f"{path} is not a JSON object", found=type(data).__name__)
    return data
