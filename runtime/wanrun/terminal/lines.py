"""The lines that commands print: one each, whatever names are in it, and whether or not anybody can take it.

A result, such as that of ``--list``, is what the command was started for: if it cannot be printed, the
command fails. A report, such as ``wrote out.mp4``, is not: the video is there. A warning is not either.
"""

from __future__ import annotations

__all__ = ["print_error", "print_result", "report", "silence_stdout", "warn"]

import contextlib
import os
import sys
from collections.abc import Sequence

import click

from wanrun.errors import escaped, unwritable


def print_result(*lines: str) -> None:
    """Prints lines that the command was started for.

    Raises:
        UsageError: if standard output cannot be written, for example to a file on a full disk.
        BrokenPipeError: if its reader has gone.
    """
    if (error := _print(lines)) is not None:
        raise unwritable("standard output", error) from error


def report(*lines: str) -> None:
    """Prints lines about finished work. If standard output fails, the work goes on, with a warning.

    Raises:
        BrokenPipeError: if the reader of the output has gone.
    """
    if (error := _print(lines)) is not None:
        warn(f"standard output cannot be written: {error.strerror}; the work goes on without it")


def warn(message: str) -> None:
    """Prints a warning to standard error."""
    print_error(f"warning: {message}")


def print_error(line: str) -> None:
    """Prints a line to standard error, if that can be written.

    Raises:
        BrokenPipeError: if its reader has gone.
    """
    try:
        click.echo(escaped(line), err=True)
    except BrokenPipeError:
        raise
    except OSError:
        _silence(2)


def _print(lines: Sequence[str]) -> OSError | None:
    """Prints lines to standard output; returns the error after which it is sent to /dev/null, if any."""
    try:
        for line in lines:
            try:
                click.echo(escaped(line))
            except UnicodeEncodeError:  # the output's encoding is not UTF-8
                click.echo(escaped(line).encode("ascii", "backslashreplace").decode("ascii"))
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()
        return error
    return None


def silence_stdout() -> None:
    """Sends standard output to /dev/null: what is still buffered would fail again when it is flushed."""
    _silence(1)
    with contextlib.suppress(OSError):
        sys.stdout.flush()


def _silence(number: int) -> None:
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, number)
    finally:
        os.close(devnull)
