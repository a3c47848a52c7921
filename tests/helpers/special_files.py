"""Files that are none, or that have no end: reading one must not wait for ever, or fill the memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


KINDS: dict[str, Callable[[Path], None]] = {"a pipe": os.mkfifo, "a device": _device, "a terabyte": _endless}
"""What makes one at a path where nothing is."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails if a block takes longer, also one that waits in the system."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it takes more than {seconds} s")  # no OSError, which would be caught

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
