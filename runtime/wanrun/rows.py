"""The rows of a typed record of options: what the users of each option see of it.

A record declares each option once: a field with its type, its default and an ``option``. Command lines,
prompts files, recipes, keywords of Python, messages and the tables in docs/commands.md derive from the rows.
"""

from __future__ import annotations

__all__ = ["ARGUMENT", "MOST_TOLD", "Row", "option", "record_of", "rows_of"]

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

_Record = TypeVar("_Record", bound=msgspec.Struct)

MOST_TOLD = 1e9
"""A greater bound is that of a number's type, which no message names."""

ARGUMENT = Meta(extra={"argument": True})
"""Marks a field of a record that is not an option, such as the folder that a command is given."""


def option(
    help: str,
    *,
    default: str = "",
    models: str = "",
    value: str = "",
    also: str = "",
    section: str = "",
    sets: str | None = None,
    writes: object = None,
    choices: Sequence[Any] = (),
    parse: Callable[[str], Any] | None = None,
    flag: str = "",
    short: str = "",
    page: str | Mapping[str, str] = MappingProxyType({}),
    needs: Callable[[Any], bool] | None = None,
    built: Callable[[Any], bool] | None = None,
    recipe: bool = True,
    commands: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Meta:
    """Returns the texts about an option for users: see ``Row``.

    The default, the value, the choices and the flag follow from the field where they are empty. ``also`` has
    names with spaces between them: those of diffusers' pipelines, of Wan's own ``generate.py``, and what is
    often written.
    """
    texts = {
        "default": default,
        "models": models,
        "value": value,
        "also": tuple(also.split()),
        "section": section,
        "sets": sets,
        "writes": writes,
        "choices": tuple(choices),
        "parse": parse,
        "flag": flag,
        "short": short,
        "page": MappingProxyType({"": page} if isinstance(page, str) else dict(page)),
        "needs": needs,
        "built": built,
        "recipe": recipe,
        "commands": commands,
    }
    return Meta(description=help, extra=texts)


@dataclass(frozen=True)
class Row:
    """The facts about one option that its users see.

    Attributes:
        name: the Python keyword.
        key: the name in JSON and in recipes; with dashes, that of the command line, unless ``flag`` differs.
        flag: the option's spelling on the command line.
        short: a short one, such as ``-o``; empty for none.
        type: the type that msgspec converts a value to.
        base: ``str``, ``int``, ``float``, ``bool`` or ``Path``; ``tuple`` for (width, height); of values
            that are records their class, and ``parse`` makes one of a text.
        many: whether several values may be given.
        numbers: whether the value is a list of numbers; ``base`` is the type of each.
        required: whether there is no default.
        opposite: whether the option is a flag that is not off by default: ``--no-X`` turns it off.
        choices: the possible values; empty if any value is possible.
        bounds: least and most value, of a list or a text its length; None for no bound.
        positive: whether the value must be above 0.
        help: the option's effect.
        value: the value's name, with its unit.
        default: the default in words; empty for a flag, and for an option that is required or has none.
        models: the models that have the option; empty for all.
        also: further names that are understood, and that no help shows.
        section: the section of the command's help; empty for an option that only Python has, or for one of a
            generation, whose section follows from its models.
        sets: the value that a flag of the command line sets; None for other options.
        writes: of an option that names an output, its ``wanrun.claims.Place``; None for other options.
        parse: returns the value of a text with its own syntax, or raises UsageError; of texts to choose from
            the one that a further name stands for, or another one of - and _; None for other options.
        page: the help for clients of a server, where ``help`` says what does not concern them: under "" that
            of any model, under the words of ``models`` what stands instead for such a model, and under a
            choice a sentence that is added where it can be chosen.
        needs: whether a model has the option, by the manifest; None where its inputs and defaults tell: see
            ``wanrun.request.offered``.
        built: whether a profile is built for the option, by its build options; None where all are.
        recipe: whether a recipe has the option too; of the build's.
        commands: further commands that have the option, and the attributes that differ there: see ``of``.
    """

    name: str
    key: str
    flag: str
    short: str
    type: Any
    base: type[Any]
    many: bool
    numbers: bool
    required: bool
    opposite: bool
    choices: tuple[Any, ...]
    bounds: tuple[float | None, float | None]
    positive: bool
    help: str
    value: str
    default: str
    models: str
    also: tuple[str, ...]
    section: str
    sets: str | None
    writes: Any
    parse: Callable[[str], Any] | None
    page: Mapping[str, str]
    needs: Callable[[Any], bool] | None
    built: Callable[[Any], bool] | None
    recipe: bool
    commands: Mapping[str, Mapping[str, Any]]

    def of(self, command: str) -> Row:
        """Returns the option as another command has it."""
        return replace(self, **self.commands[command])

    @property
    def record(self) -> bool:
        """Whether each value is a record."""
        return issubclass(self.base, msgspec.Struct)

    @property
    def kind(self) -> str:
        """The value's type in words."""
        if self.numbers:
            return "a list of numbers"
        if self.record:
            return (
                f"{self.value}, an object with {', '.join(self.base.__struct_fields__)}, or a list of these"
            )
        words = _WORDS[self.base]
        return f"{words} or a list of strings" if self.many else words

    @property
    def expected(self) -> str:
        """The possible values in words."""
        if self.choices:
            return " or ".join(map(str, self.choices))
        least, most = self.bounds
        if self.base is str and most is not None:
            return f"{self.kind} of at most {most} characters"
        if self.numbers:
            return f"1 to {most} {'positive numbers' if self.base is float else 'whole numbers from 0 on'}"
        if least is not None and most is not None and most < MOST_TOLD:
            return f"{least:g} to {most:g}"
        if self.positive:
            return "a positive number"
        if least is not None and least >= 0:
            _, word, other = self.value.partition("|")
            return f"{self.kind}, at least {least:g}" + (f", or {other}" if word else "")
        return self.kind if self.base is not str else f"{self.kind} such as 832x480"


_WORDS: Mapping[type[Any], str] = MappingProxyType(
    {
        str: "a string",
        int: "an integer",
        float: "a number",
        bool: "True or False",
        Path: "a path",
        tuple: "(width, height) in pixels",
    }
)
_BASES: Mapping[type[Any], type[Any]] = MappingProxyType(
    {
        msgspec.inspect.StrType: str,
        msgspec.inspect.IntType: int,
        msgspec.inspect.FloatType: float,
        msgspec.inspect.BoolType: bool,
        msgspec.inspect.TupleType: tuple,
        msgspec.inspect.DictType: dict,
    }
)
_VALUES: Mapping[type[Any], str] = MappingProxyType({str: "TEXT", int: "N", float: "X", Path: "PATH"})


def _bare(info: Any) -> Any:
    """Returns a type without metadata; of a union its first type, which leaves out None and tuples of it."""
    while isinstance(info, msgspec.inspect.Metadata):
        info = info.type
    if isinstance(info, msgspec.inspect.UnionType):
        return _bare(info.types[0])
    return info


def _holds_records(info: Any) -> bool:
    """Returns whether a type is a tuple of records."""
    several = isinstance(info, msgspec.inspect.VarTupleType)
    return several and isinstance(_bare(info.item_type), msgspec.inspect.StructType)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """Returns the values of a ``Literal`` inside an annotation, in the written order: msgspec sorts them."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next(filter(None, map(_choices, get_args(annotation))), ())


def _meant(choices: Sequence[str], parse: Callable[[str], str] | None, text: str) -> str:
    """Returns the choice that a text stands for, or else the text."""
    name = text if parse is None else parse(text)
    return next((one for one in choices if one.replace("_", "-") == name.replace("_", "-")), name)


def _row_of(info: msgspec.structs.FieldInfo) -> Row:
    described = msgspec.inspect.type_info(info.type)
    assert isinstance(described, msgspec.inspect.Metadata) and described.extra is not None
    texts = described.extra
    bare, choices = _bare(described), texts["choices"] or _choices(info.type)
    if many := isinstance(bare, msgspec.inspect.ListType) or _holds_records(bare):
        bare = _bare(bare.item_type)
    numbers = isinstance(bare, msgspec.inspect.VarTupleType)
    least, most = getattr(bare, "ge", None), getattr(bare, "le", None)
    if isinstance(bare, msgspec.inspect.StrType):
        most = bare.max_length
    if isinstance(bare, msgspec.inspect.VarTupleType):
        least, most, bare = bare.min_length, bare.max_length, _bare(bare.item_type)
    base = type(choices[0]) if choices else getattr(bare, "cls", None) or _BASES[type(bare)]
    flag = base is bool or texts["sets"] is not None
    default = "" if flag or info.default in (None, (), msgspec.NODEFAULT) else str(info.default)
    value = "|".join(map(str, choices)) or _VALUES.get(base, "")
    if getattr(bare, "min_length", None):
        value = "FILE"
    own = {"default": texts["default"] or default, "value": texts["value"] or value, "choices": choices}
    if choices and base is str:
        own["parse"] = partial(_meant, choices, texts["parse"])
    own["flag"] = texts["flag"] or f"--{info.encode_name.replace('_', '-')}"
    return Row(
        name=info.name,
        key=info.encode_name,
        type=info.type,
        base=base,
        many=many or isinstance(info.default, tuple),
        numbers=numbers,
        required=info.required,
        opposite=base is bool and info.default is not False,
        bounds=(least, most),
        positive=getattr(bare, "gt", None) == 0,
        help=(described.extra_json_schema or {})["description"],
        **{**texts, **own},
    )


@lru_cache
def rows_of(kind: type[msgspec.Struct]) -> tuple[Row, ...]:
    """Returns the options of a record in the order of its fields; a record in a field gives its own there."""
    found = list[Row]()
    for info in msgspec.structs.fields(kind):
        if _is_record(info.type):
            found += rows_of(info.type)
        elif not _is_argument(info.type):
            found.append(_row_of(info))
    return tuple(found)


def _is_record(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def _is_argument(annotation: Any) -> bool:
    return ARGUMENT in getattr(annotation, "__metadata__", ())


def record_of(kind: type[_Record], values: Mapping[str, Any]) -> _Record:
    """Makes a record, and the records in its fields, of values by option; the others have their defaults."""
    given = dict[str, Any]()
    for info in msgspec.structs.fields(kind):
        if _is_record(info.type):
            given[info.name] = record_of(info.type, values)
        elif info.name in values:
            given[info.name] = values[info.name]
    return kind(**given)
