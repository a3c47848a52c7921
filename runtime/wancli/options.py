"""Options of a command that are made of the rows of a record."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from wancli.command import Input, Number, Output, Written, options_of
from wanrun.rows import Row


def click_options(rows: Iterable[Row]) -> Callable[[Any], Any]:
    """Returns the decorator that adds options to a command, whose help names the range of numbers."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for row in reversed(list(rows)):
            function = click_option(row, ranges=True)(function)
        return function

    return decorate


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are given, of those that a command has."""
    return {name: value for name, value in options.items() if value not in (None, ())}


def click_option(row: Row, section: str = "Options", *, ranges: bool = False) -> Callable[[Any], Any]:
    """Returns the decorator that adds an option to a command.

    An option that is not given is None, False or (): the record has the defaults.

    Args:
        row: the option.
        section: the section of the command's help.
        ranges: whether the value must be in the row's bounds, which the help then names. False where the
            record's reader checks them.
    """
    models = f" ({row.models})" if row.models else ""
    text = f"{row.help.rstrip('.')}{models}." if row.help else ""
    default = f"  [default: {row.default}]" if row.default else ""
    spelled = f"{row.flag}/--no-{row.flag.removeprefix('--')}" if row.opposite else row.flag
    names = (spelled, *filter(None, [row.short]), row.name)
    option = functools.partial(options_of(section), *names, help=text + default, required=row.required)
    if row.opposite:
        return option(default=None, callback=_as_several if row.many else None)
    if row.base is bool:
        return option(is_flag=True)
    if row.sets is not None:
        return option(flag_value=row.sets, default=None)
    kind = _kind(row, ranges)
    metavar = None if isinstance(kind, click.Choice) else row.value
    return option(type=kind, multiple=row.many, metavar=metavar)


def _as_several(context: click.Context, option: click.Parameter, value: bool | None) -> tuple[bool, ...]:
    """Returns the value of a flag for an option that may have several values in a recipe."""
    return () if value is None else (value,)


def _kind(row: Row, ranges: bool) -> Any:
    """Returns click's type of an option."""
    if row.writes is not None:
        return Output(row.writes, row.base)
    if row.parse is not None:
        return Written(row.value, row.parse)
    if row.choices and row.base is str:
        return click.Choice(row.choices)
    if row.base is Path or {"DIR", "FILE"} & {*row.value.split("|")}:
        return Input(row.base, tree=row.value == "DIR")
    least, most = row.bounds
    if ranges and row.base is int and least is not None and least >= 0:
        return click.IntRange(int(least))
    if ranges and row.base is float:
        return Number(least, most)
    return row.base
