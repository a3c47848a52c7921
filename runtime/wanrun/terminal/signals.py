"""Ends a command on SIGINT, SIGTERM and SIGHUP: one word on stderr, exit code 128 and the signal's number.

A thread waits for the signal and ends the process, whatever the main thread does. An exception in the main
thread would be late in XLA, whose calls return after minutes for a large model; it would crash in the middle
of an import, and be dropped in a callback of an extension module. The main thread stands still instead, so
that it does not make anew what is being removed.

Python's handler in C writes the signal to a pipe. Signals that are blocked in all threads, for ``sigwait``,
would be blocked in the processes that are started too, and ``multiprocessing`` unblocks them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection, Mapping
from functools import partial
from types import FrameType, MappingProxyType

from wanrun.terminal.undo import end

WORDS: Mapping[int, str] = MappingProxyType(
    {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
)
"""What a command says that a signal ended."""

HOLD_SECONDS = 0.1
"""What the end waits until the main thread stands still. It does not before a call of XLA returns."""


def start() -> None:
    """Lets the signals of ``WORDS`` end this process, except what is ignored (nohup) or handled already.

    The main thread of a command calls it before it imports anything that takes time.
    """
    plain = (signal.SIG_DFL, signal.default_int_handler)
    numbers = [number for number in WORDS if signal.getsignal(number) in plain]
    read, write = os.pipe()
    os.set_blocking(write, False)
    main = _Main()
    try:
        threading.Thread(target=_watch, args=(read, numbers, main), name="signals", daemon=True).start()
    except RuntimeError:  # there are no more threads: what the command does next will fail, and say so
        return
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, main.handle)


def _watch(pipe: int, numbers: Collection[int], main: _Main) -> None:
    """Waits for one of the signals, and ends the process."""
    while not (arrived := [number for number in os.read(pipe, 64) if number in numbers]):
        pass
    end(128 + arrived[0], WORDS[arrived[0]], partial(main.hold, arrived[0]))


class _Main:
    """The main thread, where Python calls a signal's handler between two of its steps."""

    def __init__(self) -> None:
        self._ending, self._held = threading.Event(), threading.Event()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Stands still if the process ends. The first time, something may be beginning here."""
        if self._ending.is_set():
            self._held.set()
            threading.Event().wait()

    def hold(self, number: int) -> None:
        """Lets the handler hold the thread, from another one."""
        self._ending.set()
        signal.pthread_kill(threading.main_thread().ident or 0, number)
        self._held.wait(HOLD_SECONDS)
