"""Prepares a command's streams, warnings and signals, before the imports that take time."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType

from wanrun.undo import end, stand_still

WORDS: Mapping[int, str] = MappingProxyType(
    {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
)
"""The last word of a command that a signal has ended."""


def start() -> None:
    """Opens closed streams, silences warnings of NumPy and Pillow, and lets signals end the process.

    A signal that is ignored (nohup) or already handled stays so.
    """
    for number in range(3):  # the next file would get the number of a closed one, as with 2>&-
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if not sys.warnoptions:
        for kind in (RuntimeWarning, UserWarning):
            warnings.simplefilter("ignore", kind)
    plain = (signal.SIG_DFL, signal.default_int_handler)
    numbers = [number for number in WORDS if signal.getsignal(number) in plain]
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        threading.Thread(target=_watch, args=(read, numbers), name="signals", daemon=True).start()
    except RuntimeError:  # no thread is left: the command's next work fails, and says so
        return
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, stand_still)


def _watch(pipe: int, numbers: Collection[int]) -> None:
    """Ends the process when Python's C handler has written a signal's number to a pipe."""
    while (number := os.read(pipe, 1)[0]) not in numbers:
        pass
    end(128 + number, WORDS[number], partial(signal.pthread_kill, threading.main_thread().ident or 0, number))
