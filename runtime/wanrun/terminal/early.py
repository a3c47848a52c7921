"""What a command does before it imports anything that takes time: its signals and its standard streams."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
"""What a command says that a signal ended."""


def end_now(number: int, frame: FrameType | None = None) -> None:
    """Ends the process without cleaning up: one word on stderr, exit code 128 and the signal's number."""
    with contextlib.suppress(OSError):  # closed, or its reader has gone
        os.write(2, f"{WORDS[signal.Signals(number)]}\n".encode())
    os._exit(128 + number)


def start() -> None:
    """Opens missing streams, and lets signals end the process until ``terminal.signals`` takes over."""
    _open_streams()
    _handle_signals()


def _open_streams() -> None:
    """Opens /dev/null for a standard stream that is closed, as with ``2>&-``.

    The next file that is opened would get the number of the closed one, and be written to.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _handle_signals() -> None:
    """Lets the signals of ``WORDS`` end the process, except those that are ignored or handled already.

    Nothing has been written yet, so there is nothing to clean up.
    """
    for number in WORDS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end_now)
