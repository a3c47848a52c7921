"""A terminal that keeps what is written to it, and waiting for that."""

from __future__ import annotations

import io
import time
from collections.abc import Callable


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
