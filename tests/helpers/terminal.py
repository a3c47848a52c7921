"""A terminal that keeps what is written to it, and what a command has said."""

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


def complaints(errors: str) -> list[str]:
    """Its lines, but for what it was waiting for, which a slow machine has it say every 10 s."""
    return [line for line in errors.splitlines() if not line.startswith("waiting: ")]
