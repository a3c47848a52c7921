"""Reads a request: checks the values of options, and names every problem in one line."""

from __future__ import annotations

__all__ = ["is_drawn", "read_request"]

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from wanrun.errors import UsageError, field, quoted, shortened, together, wrong_type
from wanrun.media.inputs import url_error
from wanrun.request.elsewhere import ALIKE, ELSEWHERE, nearest
from wanrun.request.request import RANDOM, Request
from wanrun.request.schema import aliases, rows
from wanrun.rows import Row

_Kind = TypeVar("_Kind", bound=Request)


def as_plain(value: Any) -> Any:
    """Returns a value of NumPy, alone, in a list, tuple or dict, as Python's, and a path as a string."""
    if type(value) in (list, tuple):
        return type(value)(map(_as_plain, value))
    return _as_plain(value)


def _as_plain(value: Any) -> Any:
    if type(value) is dict:
        return {name: _alone(one) for name, one in value.items()}
    return _alone(value)


def _alone(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        with contextlib.suppress(TypeError):  # it names no path
            return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") else value


def is_drawn(seed: object) -> bool:
    """Whether a seed, as a plain value, stands for one that is drawn: ``random``, or other tools' -1."""
    return seed == RANDOM or (type(seed) is int and seed == -1)


def read_request(
    given: Iterable[tuple[str, Any]],
    kind: type[_Kind],
    shared: _Kind | None = None,
    instead: Mapping[str, str] = ELSEWHERE,
) -> _Kind:
    """Checks values by the options' Python names, and makes a request of them.

    Args:
        given: names and values, None among none of them: strings, paths, and numbers, or lists of them, of
            Python or NumPy.
        kind: ``Request``, or a kind of it with more options.
        shared: a request that was already read, whose values hold for what is not given; not its prompt.
        instead: what to do, by names that no option has.

    Raises:
        UsageError: naming every problem, in one line.
    """
    known = {row.name: row for row in rows(kind)}
    values: dict[str, Any] = {}
    problems: list[UsageError] = []
    for written, value in given:
        name = aliases(kind).get(written, written)
        if name in values:
            problems.append(UsageError("conflict", f"{field(name)} is given twice"))
        elif name not in known:
            problems.append(unknown_option(name, {**{one: one for one in known}, **aliases(kind)}, instead))
        else:
            plain = as_plain(value)
            if name == "seed" and is_drawn(plain):
                plain = int.from_bytes(os.urandom(4), "little")
            if name == "size" and isinstance(plain, tuple):
                plain = "x".join(map(str, plain))
            row = known[name]
            found = list(_problems(row, plain))
            problems += found
            if not found:
                plain = msgspec.convert(_parsed(row, plain), row.type)
        values[name] = plain if name in known else None
    if "prompt" not in values:
        problems.append(UsageError("missing_parameter", "there is no prompt", expected='"prompt": "..."'))
    if problems:
        raise together(problems)
    return kind(**values) if shared is None else msgspec.structs.replace(shared, **values)


def _parsed(row: Row, value: Any) -> Any:
    """Returns a value with what its texts stand for: a choice of another name, or a record."""
    if row.parse is None or not (row.choices or row.record):
        return value
    if row.record:
        several = value if isinstance(value, list | tuple) else [value]
        return [row.parse(one) if isinstance(one, str) else one for one in several]
    return row.parse(value) if isinstance(value, str) else value


def unknown_option(name: str, known: Mapping[str, str], instead: Mapping[str, str]) -> UsageError:
    """Returns the error of an unknown option, with what to do if the name is known or near.

    ``known`` are the existing options, by every name that is understood; ``instead`` says what to do, by
    names that no option has.
    """
    what = f"unknown option {shortened(name)}"
    meant = name if name in instead else nearest(name, [*known, *instead])
    if meant is None:
        like = nearest(name, known, ALIKE)
        such = "" if like is None else f", such as {field(known[like])}"
        return UsageError("unknown_parameter", what, expected=f"an option that wanrun --help lists{such}")
    return UsageError(
        "unknown_parameter", what, remedy=f"use {field(known[meant])}" if meant in known else instead[meant]
    )


def _problems(row: Row, value: Any) -> Iterator[UsageError]:
    """Yields the problems of a value."""
    try:
        parsed = _parsed(row, value)
    except UsageError as wrong:
        yield wrong
        return
    if not _fits(parsed, row):
        yield wrong_type(field(row.name), row.kind, value)
        return
    if row.value in ("FILE", "DIR|FILE"):
        names = [value] if isinstance(value, str) else value or ()
        for name in names:
            if (error := url_error(name, field(row.name))) is not None:
                yield error
            elif not _names_a_file(name):
                yield UsageError("invalid_value", f"{field(row.name)} is no file name", found=quoted(name))
        return
    try:
        msgspec.convert(parsed, row.type)
    except (msgspec.ValidationError, UnicodeEncodeError) as wrong:  # half of a surrogate pair
        found = wrong if row.record else value if type(value) is float else quoted(value)
        if (row.choices and row.base is str) or row.record:
            yield UsageError(
                "invalid_value", f"{field(row.name)} cannot be used", expected=row.expected, found=found
            )
        else:
            yield UsageError(
                "out_of_range", f"{field(row.name)} is out of range", expected=row.expected, found=found
            )


def _fits(value: Any, row: Row) -> bool:
    """Returns whether a value has the option's type; True is not a number, and 3 may stand for 3.0."""
    if row.record:
        return all(isinstance(item, dict | row.base) for item in value)
    if row.many and isinstance(value, list | tuple):
        return all(type(item) is str for item in value)
    kinds = (int, float) if row.base is float else (row.base,)
    if row.numbers:
        return isinstance(value, list | tuple) and all(type(item) in kinds for item in value)
    return type(value) in kinds


def _names_a_file(name: str) -> bool:
    """Returns whether a file can have this name. An empty name would be the working directory."""
    try:
        return bool(name) and b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
