"""Signals of a command that has only started: the process ends at once, for it has written nothing.

``wanrun.signals`` takes over when the command runs. Nothing that takes time is imported here.
"""

from __future__ import annotations

import contextlib
import os
import signal

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


def handle_early() -> None:
    """Lets the signals of ``WORDS`` end the process, but for those that are ignored or handled already."""
    for number in WORDS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end_now)
