"""The rows of a request: what the users of each option see of it, derived from the record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import msgspec

from wanrun.artifact.model import MAX_FLOAT32, MAX_STEPS
from wanrun.request.request import RANDOM, Request


@dataclass(frozen=True)
class Row:
    """The facts about one option that its users see.

    Attributes:
        name: the Python keyword.
        key: the name in JSON; with dashes, that of the command line.
        type: the type that msgspec converts a value to.
        base: ``str``, ``int`` or ``float``.
        many: whether several values may be given.
        numbers: whether the value is a list of numbers; ``base`` is the type of each.
        choices: the possible values; empty if any value is possible.
        bounds: least and most value; None for no bound.
        positive: whether the value must be above 0.
        help: the option's effect.
        value: the value's name, with its unit.
        default: the default in words; empty if the option is required or has no default.
        models: the models that have the option; empty for all.
        also: further names that are understood.
    """

    name: str
    key: str
    type: Any
    base: type[Any]
    many: bool
    numbers: bool
    choices: tuple[Any, ...]
    bounds: tuple[float | None, float | None]
    positive: bool
    help: str
    value: str
    default: str
    models: str
    also: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The option's spelling on the command line."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def kind(self) -> str:
        """The value's type in words."""
        if self.numbers:
            return "a list of numbers"
        words = {str: "a string", int: "an integer", float: "a number"}[self.base]
        return f"{words} or a list of strings" if self.many else words

    @property
    def expected(self) -> str:
        """The possible values in words."""
        if self.choices:
            return " or ".join(map(str, self.choices))
        if self.numbers:
            return f"1 to {MAX_STEPS} positive numbers"
        least, most = self.bounds
        if None not in self.bounds and most != MAX_FLOAT32:
            return f"{least:g} to {most:g}"
        if self.positive:
            return "a positive number"
        if least is not None and least >= 0:
            return f"{self.kind}, at least {least:g}" + (f", or {RANDOM}" if RANDOM in self.value else "")
        return self.kind if self.base is not str else f"{self.kind} such as 832x480"


_BASES: Mapping[type[Any], type[Any]] = MappingProxyType(
    {msgspec.inspect.StrType: str, msgspec.inspect.IntType: int, msgspec.inspect.FloatType: float}
)


def _bare(info: Any) -> Any:
    """Returns a type without metadata; of a union its first type, which leaves out None and tuples of it."""
    while isinstance(info, msgspec.inspect.Metadata):
        info = info.type
    if isinstance(info, msgspec.inspect.UnionType):
        return _bare(info.types[0])
    return info


def _choices(annotation: Any) -> tuple[Any, ...]:
    """Returns the values of a ``Literal`` inside an annotation, in the written order: msgspec sorts them."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next(filter(None, map(_choices, get_args(annotation))), ())


def _row_of(info: msgspec.structs.FieldInfo) -> Row:
    described = msgspec.inspect.type_info(info.type)
    assert isinstance(described, msgspec.inspect.Metadata) and described.extra is not None
    bare, choices = _bare(described), _choices(info.type)
    numbers = isinstance(bare, msgspec.inspect.VarTupleType)
    if isinstance(bare, msgspec.inspect.VarTupleType):
        bare = _bare(bare.item_type)
    base = type(choices[0]) if choices else _BASES[type(bare)]
    least, most = getattr(bare, "ge", None), getattr(bare, "le", None)
    many, extra = isinstance(info.default, tuple), described.extra
    default = extra["default"]
    if default is None and info.default not in (None, (), msgspec.NODEFAULT):
        default = str(info.default)
    value = "|".join(map(str, choices)) or {str: "TEXT", int: "N", float: "X"}[base]
    if getattr(bare, "min_length", None):
        value = "FILE"
    return Row(
        name=info.name,
        key=info.encode_name,
        type=info.type,
        base=base,
        many=many,
        numbers=numbers,
        choices=choices,
        bounds=(least, most),
        positive=getattr(bare, "gt", None) == 0,
        help=(described.extra_json_schema or {})["description"],
        value=extra["value"] or value,
        default=default or "",
        models=extra["models"] or "",
        also=extra["also"],
    )


@lru_cache
def rows(kind: type[Request] = Request) -> tuple[Row, ...]:
    """Returns the options of a request, or of a subclass with more options, in the order of the help."""
    return tuple(map(_row_of, msgspec.structs.fields(kind)))


@lru_cache
def aliases(kind: type[Request] = Request) -> Mapping[str, str]:
    """Returns the further names that are understood, with the Python name of the option that each means."""
    return MappingProxyType({other: row.name for row in rows(kind) for other in row.also})


def schema() -> dict[str, Any]:
    """Returns the JSON schema of a request; a missing option has its default, and null is not a value."""
    whole = msgspec.json.schema(Request)["$defs"][Request.__name__]
    for item in whole["properties"].values():
        kinds = [kind for kind in item.pop("anyOf", ()) if kind != {"type": "null"}]
        if item.get("default") is None:
            item.pop("default", None)
        item |= kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {}
    return dict(whole)
