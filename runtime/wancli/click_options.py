"""Makes a command's options from the rows of a record."""

from __future__ import annotations

__all__ = ["given", "made_options"]

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from wancli.command import InputPath, Number, OutputPath, Written, options_of
from wanrun.rows import MOST_TOLD, Row


class _Chosen(click.Choice[str]):
    """A click type for some exact texts: only the names of options may be spelled in other ways.

    ``parse`` returns the text that a further name stands for, or else the name; None for no further names.
    """

    def __init__(self, choices: Sequence[str], parse: Callable[[str], str] | None = None) -> None:
        super().__init__(choices)
        self._parse = parse

    def normalize_choice(self, choice: object, ctx: click.Context | None) -> str:
        return str(choice)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value if self._parse is None else self._parse(value), param, ctx)


def made_options(rows: Iterable[Row]) -> list[click.Option]:
    """Returns the options of a command without sections, whose help names the range of numbers."""
    return [click.Option(_names(row), **_settings(row, ranges=True)) for row in rows]


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a command that the user has given."""
    return {name: value for name, value in options.items() if value not in (None, ())}


def click_option(row: Row, section: str) -> Callable[[Any], Any]:
    """Returns the decorator that adds an option to a section of a command, in any range."""
    return options_of(section)(*_names(row), **_settings(row, ranges=False))


def section_of(row: Row) -> str:
    """Returns the help's section of an option; of a generation's, that of the only model that has it."""
    if row.section:
        return row.section
    if not row.models:
        return "Sampling"
    model = row.models.partition(" with ")[0]
    return "Images" if "," in model else model[0].upper() + model[1:]


def _names(row: Row) -> list[str]:
    """Returns the option's flags and its name, as click takes them."""
    spelled = f"{row.flag}/--no-{row.flag.removeprefix('--')}" if row.opposite else row.flag
    return [spelled, *filter(None, [row.short]), row.name]


def _settings(row: Row, ranges: bool) -> dict[str, Any]:
    """Returns click's settings of an option; one that is not given is None, False or ()."""
    models = f" ({row.models})" if row.models else ""
    text = f"{row.help.rstrip('.')}{models}." if row.help else ""
    default = f"  [default: {row.default}]" if row.default else ""
    settings = {"help": text + default, "required": row.required}
    if row.opposite:
        return {**settings, "default": None, "callback": _as_several if row.many else None}
    if row.base is bool:
        return {**settings, "is_flag": True}
    if row.sets is not None:
        return {**settings, "flag_value": row.sets, "default": None}
    kind = _kind(row, ranges)
    metavar = None if isinstance(kind, click.Choice) else row.value
    return {**settings, "type": kind, "multiple": row.many, "metavar": metavar}


def _as_several(context: click.Context, option: click.Parameter, value: bool | None) -> tuple[bool, ...]:
    """Returns the value of a flag for an option that may have several values in a recipe."""
    return () if value is None else (value,)


def _kind(row: Row, ranges: bool) -> Any:
    """Returns click's type of an option."""
    if row.writes is not None:
        return OutputPath(row.writes, row.base)
    if row.choices and row.base is str:
        return _Chosen(row.choices, row.parse)
    if row.parse is not None:
        return Written(row.value, row.parse)
    if row.base is Path or {"DIR", "FILE"} & {*row.value.split("|")}:
        return InputPath(row.base, tree=row.value == "DIR")
    least, most = row.bounds
    if ranges and row.base is int and least is not None and least >= 0:
        return click.IntRange(int(least), None if most is None or most > MOST_TOLD else int(most))
    if ranges and row.base is float:
        return Number(least, most)
    return row.base
