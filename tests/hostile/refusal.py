"""What holds for every hostile input: it is refused by code, in one line, in time, and nothing changes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click
import pytest

from helpers.refusals import json_error
from wancli.console import run

LIMIT_SECONDS = 10.0
"""A refusal takes milliseconds; this is for what would never end."""

Refuse = Callable[..., dict[str, Any]]


class HungError(BaseException):
    """Not an Exception: nothing may catch it on its way to the test."""


@contextmanager
def time_limit(seconds: float = LIMIT_SECONDS) -> Iterator[None]:
    """Raises HungError in the main thread, again and again, until it gets out."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def everything(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every name below a folder, with the kind, size and time of what it is; links are not followed."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = Path(parent, name).lstat()
            found[f"{parent}/{name}"] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def refusal(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    command: click.Command,
    arguments: Sequence[object],
    exit_code: int,
) -> dict[str, Any]:
    """Runs a command that has to be refused, and returns its error.

    Args:
        capsys: of the test.
        folder: in which nothing may be written, changed or left.
        command: runs in this process.
        arguments: of the command.
        exit_code: that it has to end with.
    """
    before = everything(folder)
    capsys.readouterr()
    with time_limit():
        ended = run(command, [*map(str, arguments), "--json-errors"])
    output = capsys.readouterr()
    assert ended == exit_code, output.err
    assert output.out == "" or (
        command.name == "wanbuild" and arguments[0] == "verify"
    )  # it says how far it is
    assert everything(folder) == before
    (line,) = output.err.splitlines()
    error = json_error(line)
    assert error["code"] != "internal_error" and "\x1b" not in line and len(line) < 20_000
    assert all(value.isprintable() for value in error.values() if isinstance(value, str)), error
    return error


def check_named(error: dict[str, Any], code: str, values: Sequence[object]) -> None:
    """Checks an error's code, and values that its sentence has to name."""
    assert error["code"] == code, error
    for value in values:
        assert str(value) in error["message"], (value, error)


def first_of_each(rows: Iterable[Any], kind: Callable[[Any], Hashable]) -> list[Any]:
    """Numbered rows: the first of each kind is in ``make test``, and the others are thorough."""
    seen: set[Hashable] = set()
    parameters: list[Any] = []
    for number, row in enumerate(rows):
        first = kind(row) not in seen
        seen.add(kind(row))
        marks = [] if first else [pytest.mark.thorough]
        parameters.append(pytest.param(number, row, id=row.name, marks=marks))
    return parameters


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    data = json.loads(path.read_bytes())
    change(data)
    path.unlink()  # it may be a hard link
    path.write_text(json.dumps(data))
