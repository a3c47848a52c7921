"""Reports of waits, line by line."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str], None]


def quiet(line: str) -> None:
    """Reports nothing."""
