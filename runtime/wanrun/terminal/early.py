"""What a command does before it imports anything that takes time: its signals and its standard streams."""

from __future__ import annotations

import os
import sys
import warnings

from wanrun.terminal import signals


def start() -> None:
    """Opens missing streams, lets signals end the process, and leaves out NumPy's warnings of overflow.

    What is not finite is refused in a line; ``python -W`` shows the warnings.
    """
    _open_streams()
    if not sys.warnoptions:
        for kind in (RuntimeWarning, UserWarning):  # NumPy's, Pillow's
            warnings.simplefilter("ignore", kind)
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
