"""The work under way in this process, and the end of the process, at a signal too, without unwinding."""

from __future__ import annotations

__all__ = ["begun", "end", "say", "stand_still", "undone_at_exit"]

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn, TypeVar

T = TypeVar("T")


class _Process:
    """The functions that undo what is under way, in the order of beginning.

    ``changing`` is held by a thread that begins something or is done with it, and for ever by the one that
    ends the process: the others stand still there, and do not make again what is being removed.
    """

    def __init__(self) -> None:
        self.undo: dict[object, Callable[[], object]] = {}
        self.changing = threading.RLock()


_PROCESS = _Process()


@contextlib.contextmanager
def begun(begin: Callable[[], T], undo: Callable[[T], object]) -> Iterator[T]:
    """Begins something, a process for example, and undoes it when the context is left or the process ends.

    Args:
        begin: returns it, or raises if it cannot begin.
        undo: takes it, and no lock. The main thread may stand still in it when another one calls it again.
    """
    with contextlib.ExitStack() as stack:
        with _PROCESS.changing:
            made = begin()
            stack.enter_context(undone_at_exit(partial(undo, made)))
        stack.callback(undo, made)
        yield made


@contextlib.contextmanager
def undone_at_exit(undo: Callable[[], object]) -> Iterator[None]:
    """Calls a function, which takes no lock, if the process ends while the context is entered."""
    key = object()
    with _PROCESS.changing:
        _PROCESS.undo[key] = undo
    try:
        yield
    finally:
        with _PROCESS.changing:
            del _PROCESS.undo[key]


def stand_still(*_: object) -> None:
    """Keeps a thread from going on while the process ends: a handler of signals, for the main thread."""
    with _PROCESS.changing:
        pass


def end(code: int, line: str = "", hold: Callable[[], object] = lambda: None) -> NoReturn:
    """Ends the process with an exit code, perhaps a line on stderr, and what is under way, the last first.

    A second caller waits for the first. What other threads print to stderr is lost: they fail because of it.

    Args:
        hold: lets the main thread call ``stand_still``, wherever it is.
    """
    _PROCESS.changing.acquire()
    try:
        hold()
        stderr = _silenced()
        if line:
            say(f"{_blank(stderr)}{line}\n", stderr)
        time.sleep(0.05 if _PROCESS.undo else 0)  # the others have come to stand still
        for undo in reversed(list(_PROCESS.undo.values())):
            with contextlib.suppress(Exception):
                undo()
    finally:
        os._exit(code)


def say(text: str, descriptor: int = 1) -> None:
    """Writes to a stream, by default stdout, without waiting for its reader or for Python's locks."""
    with contextlib.suppress(OSError):  # it is closed, its reader has gone, or its disk is full
        if select.select((), (descriptor,), (), 0)[1]:
            os.write(descriptor, text.encode(errors="backslashreplace"))


def _silenced() -> int:
    """Sends stderr to /dev/null, and returns a descriptor of what it was."""
    try:
        before = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    except OSError:  # no descriptors are left
        return 2
    return before


def _blank(descriptor: int) -> str:
    """Returns the bytes that erase the last line of a terminal, which may be one that is written over."""
    try:
        columns = os.get_terminal_size(descriptor).columns - 1
    except OSError:
        return ""
    return f"\r{' ' * columns}\r"
