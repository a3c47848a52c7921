"""What is under way in this process, and the end of the process without unwinding.

A signal ends the process whatever its threads are doing (``wanrun.terminal.signals``): no ``finally`` clause
runs then, and what has been registered here is undone instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Iterator

TYPE_CHECKING = False  # as in typing, whose import takes longer than the rest of this module
if TYPE_CHECKING:
    from typing import NoReturn, TypeVar

    T = TypeVar("T")

LOCK_SECONDS = 1.0
"""What the end of the process waits for a thread that begins something at that moment."""


class _Process:
    """The registry of this process: what undoes each thing that is under way, in the order of beginning.

    ``beginning`` is held while something begins, and from then on when the process ends; ``ending`` by the
    thread that ends it.
    """

    def __init__(self) -> None:
        self.undo: dict[object, Callable[[str], object]] = {}
        self.beginning, self.ending = threading.Lock(), threading.Lock()


_PROCESS = _Process()


@contextlib.contextmanager
def begun(begin: Callable[[], T], undo: Callable[[T], object]) -> Iterator[T]:
    """Begins something that ``end`` undoes while the context is entered; leaving the context does not.

    Args:
        begin: starts a process, for example, and returns it; raises if it cannot.
        undo: takes what ``begin`` returned. It must not take a lock that a thread may hold while it works:
            the main thread stands still when the process ends.
    """
    key = object()
    with _PROCESS.beginning:
        made = begin()
        _PROCESS.undo[key] = lambda line: undo(made)
    try:
        yield made
    finally:
        del _PROCESS.undo[key]


@contextlib.contextmanager
def undone_at_exit(undo: Callable[[], object]) -> Iterator[None]:
    """Lets ``end`` call a function while the context is entered; leaving the context calls nothing.

    It removes what a process that ends now would leave behind, and takes no lock, as for ``begun``.
    """
    with begun(lambda: undo, lambda function: function()):
        yield


@contextlib.contextmanager
def told_at_exit(tell: Callable[[str], object], seconds: float) -> Iterator[None]:
    """Lets ``end`` call a function that may take locks, and time, while the context is entered.

    Args:
        tell: takes the last line of the process.
        seconds: how long the end waits for it.
    """

    def bounded(line: str) -> None:
        thread = threading.Thread(target=tell, args=(line,), daemon=True)
        thread.start()
        thread.join(seconds)

    key = object()
    _PROCESS.undo[key] = bounded
    try:
        yield
    finally:
        del _PROCESS.undo[key]


def end(code: int, line: str = "", hold: Callable[[], object] = lambda: None) -> NoReturn:
    """Ends the process: undoes what is under way, the last first, and lets nothing begin meanwhile.

    What other threads print to stderr from now on is lost: they fail because of this. The first caller ends
    the process; a second one waits for it.

    Args:
        code: the exit code.
        line: the last line on stderr; empty for none.
        hold: holds other threads still, when nothing begins any more.
    """
    _PROCESS.ending.acquire()
    try:
        _PROCESS.beginning.acquire(timeout=LOCK_SECONDS)
        hold()
        stderr = _silenced()
        for undo in reversed(list(_PROCESS.undo.values())):
            with contextlib.suppress(Exception):
                undo(line)
        if line:
            say(f"{_blank(stderr)}{line}\n", stderr)
    finally:
        os._exit(code)


def say(text: str, descriptor: int = 1) -> None:
    """Writes to a stream, by default stdout, without waiting for its reader or for Python's locks."""
    ready = select.poll()
    ready.register(descriptor, select.POLLOUT)
    with contextlib.suppress(OSError):  # it is closed, its reader has gone, or its disk is full
        if ready.poll(0):
            os.write(descriptor, text.encode(errors="backslashreplace"))


def _silenced() -> int:
    """Sends stderr to /dev/null; returns a descriptor of what it was."""
    try:
        before = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    except OSError:  # no descriptors are left
        return 2
    return before


def _blank(descriptor: int) -> str:
    """Returns what erases the last line of a terminal, which may be one that is written over."""
    try:
        columns = os.get_terminal_size(descriptor).columns - 1
    except OSError:
        return ""
    return f"\r{' ' * columns}\r"
