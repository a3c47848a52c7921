"""What a command does before it imports anything that takes time: its signals and its standard streams."""

from __future__ import annotations

import os
import sys

from wanrun.terminal import signals


def start() -> None:
    """Opens missing streams, and lets signals end the process."""
    _open_streams()
    signals.start()


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
