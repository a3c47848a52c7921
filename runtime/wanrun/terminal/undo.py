"""What is under way in this process and has to be undone if the process ends without unwinding.

A signal ends a process whose main thread is inside XLA, whatever its other threads are doing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

FINISHED_FIRST = True
"""No signal raises inside the functions of this module; see ``wanrun.terminal.signals``."""

LOCK_SECONDS = 1.0
"""What the end of the process waits for a thread that begins something at that moment."""

_under_way: dict[int, Callable[[], object]] = {}  # of the process, in the order of their beginning
_beginning = threading.Lock()


@contextlib.contextmanager
def begun(begin: Callable[[], T], undo: Callable[[T], object]) -> Iterator[T]:
    """Begins something that ``everything_undone`` undoes while the context is entered; leaving it does not.

    No signal raises between the beginning and its record.

    Args:
        begin: starts a process, for example, and returns it; raises if it cannot.
        undo: takes what ``begin`` returned.
    """

    with _beginning:
        made = begin()
        _under_way[id(made)] = functools.partial(undo, made)
    try:
        yield made
    finally:
        del _under_way[id(made)]


@contextlib.contextmanager
def undone_at_exit(undo: Callable[[], object]) -> Iterator[None]:
    """Lets ``everything_undone`` call a function while the context is entered; leaving it calls nothing.

    Args:
        undo: removes what a process that ends now would leave behind.
    """
    with begun(lambda: undo, lambda function: function()):
        yield


@contextlib.contextmanager
def everything_undone() -> Iterator[None]:
    """Undoes what is under way, the last first, and lets nothing begin while the context is entered.

    The process is to end in it. A process is ended before the file is removed that it writes.
    """
    held = _beginning.acquire(timeout=LOCK_SECONDS)
    try:
        for undo in reversed(list(_under_way.values())):
            with contextlib.suppress(Exception):
                undo()
        yield
    finally:
        if held:
            _beginning.release()
