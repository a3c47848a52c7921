"""Shows on the status line how much of a loop is done."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TextIO

from wanrun.terminal.status import Status
from wanrun.timing.clock import now
from wanrun.timing.spans import Span


class ProgressLine:
    """A status line of how many of ``total`` units a loop has done, on stderr by default.

    ``phase`` is the name of the work, one of ``WORDS``. ``unit`` is in the singular; ``B`` is bytes.
    """

    def __init__(self, total: int, phase: str, unit: str = "B", *, stream: TextIO | None = None) -> None:
        self._done, self._lock = 0, threading.Lock()
        span = Span(phase, None, now(), progress=lambda: (self._done, total), unit=unit)
        self._status = Status(lambda: (span,), stream)

    def __enter__(self) -> ProgressLine:
        self._status.__enter__()
        return self

    def advance(self, n: int = 1) -> None:
        """Adds n finished units; thread-safe."""
        with self._lock:
            self._done += n

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.__exit__(kind, error, trace)
