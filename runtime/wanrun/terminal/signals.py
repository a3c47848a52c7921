"""Ends a command on SIGINT, SIGTERM and SIGHUP: with an exception, or without one where that is not enough.

The handler raises in the main thread, so that ``finally`` clauses run. Four things stand against that:

- A module is being imported. An exception in the middle of the C++ initialisation of an extension module
  ends in a crash.
- Something is being recorded, or removed, that must not be done by half. A module whose functions do so says
  ``FINISHED_FIRST = True`` at its top.
- Python drops what is raised in a destructor or in a callback of its garbage collector, and extension modules
  drop what a function raises that they call: msgspec does so while it hashes a type.
- The main thread is inside XLA, which returns when it has compiled or computed: after minutes for a large
  model.

A thread therefore watches. It sends the signal again if it was only noted, or was dropped, and ends the
process itself when ``GRACE_SECONDS`` have passed.

From the exception on, or from the end without one, stderr is silent: what was under way, such as the
coroutines of an event loop that never ran, prints warnings and tracebacks when it is destroyed.
"""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from wanrun.terminal.early import WORDS, end_now

GRACE_SECONDS = 3.0
"""From a signal to the end of the process, whatever the main thread does."""

_AGAIN_SECONDS = 0.02


class Stopped(KeyboardInterrupt):
    """A signal arrived.

    Attributes:
        number: the signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(WORDS[number])
        self.number = number


class Watch:
    """Handles the signals of a command while it is entered. A signal that raises silences ``sys.stderr``.

    A signal that somebody else handles, or that is ignored (nohup), stays as it is. Outside the main thread
    signals cannot be handled, and nothing is done.

    Args:
        ending: a context in which the watching thread ends the process.
    """

    def __init__(self, ending: Callable[[], AbstractContextManager[object]]) -> None:
        self._ending = ending
        self._before: dict[signal.Signals, Any] = {}
        self._noted: signal.Signals | None = None
        self._raised: Callable[[], Stopped | None] = lambda: None  # None again once it was dropped
        self._leaving = False

    def __enter__(self) -> Watch:
        if threading.current_thread() is threading.main_thread():
            plain = (signal.SIG_DFL, signal.default_int_handler, end_now)
            found = {number: signal.getsignal(number) for number in WORDS}
            self._before = {number: handler for number, handler in found.items() if handler in plain}
        if self._before:
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._hook, sys.unraisablehook = sys.unraisablehook, self._dropped
            self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
            self._thread.start()
            for number in self._before:
                signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Gives the signals back; raises Stopped if one arrived, whatever became of its first exception."""
        if not self._before:
            return
        self._leaving = True
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._write)  # which ends the thread
        self._thread.join()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._hook
        if self._noted is not None and not isinstance(error, Stopped):
            raise Stopped(self._noted) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Raises, unless it has: a second signal must not cut short the cleaning up after the first."""
        if self._noted is None:
            self._noted = signal.Signals(number)
        if self._leaving or self._raised() is not None or _must_finish(frame):
            return
        stopped = Stopped(self._noted)
        self._raised = weakref.ref(stopped)
        sys.stderr = io.StringIO()
        try:
            raise stopped
        finally:
            del stopped  # its traceback refers to this frame, and would keep it after it was dropped

    def _dropped(self, unraisable: Any) -> None:
        """Python could not raise an exception. Ours is raised again, without a word."""
        if not isinstance(unraisable.exc_value, Stopped):
            self._hook(unraisable)

    def _watch(self) -> None:
        """Waits for a signal, sees to it that it is raised, and ends what does not end."""
        number = None
        while number is None:
            if not (received := os.read(self._read, 64)):
                os.close(self._read)
                return
            number = next((value for value in received if value in self._before), None)
        main, deadline = threading.main_thread().ident, time.monotonic() + GRACE_SECONDS
        assert main is not None
        while time.monotonic() < deadline:
            if select.select([self._read], [], [], _AGAIN_SECONDS)[0] and not os.read(self._read, 64):
                os.close(self._read)
                return
            if self._noted is not None and self._raised() is None:
                signal.pthread_kill(main, self._noted)
        sys.stderr = io.StringIO()  # a thread whose ffmpeg is ended now prints a traceback
        try:
            with self._ending():
                end_now(number)
        finally:
            end_now(number)


def _must_finish(frame: FrameType | None) -> bool:
    """Whether an import is under way, or a function of a module that says ``FINISHED_FIRST``.

    The body of a ``with`` statement is not: a suspended generator has no place among the frames.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib") or "FINISHED_FIRST" in frame.f_globals:
            return True
        frame = frame.f_back
    return False
