"""Spans of time: work that has ended, and work that goes on."""

from __future__ import annotations

__all__ = ["Spans"]

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from wanrun.timing.clock import now

Interval = tuple[float, float]
Progress = Callable[[], tuple[int, int]]
"""Returns how many units of a span's work are done, and how many there are."""


@dataclass(eq=False)
class Span:
    """A named stretch of time, in seconds since the process started.

    Attributes:
        label: the object of the work, or None.
        end: infinity while it goes on.
        progress: how much of it is done; None where that is not counted.
        unit: one unit of its progress, in the singular; ``B`` is bytes.
        nbytes: the bytes that it has moved; 0 where they are not counted.
        rate: bytes a second of its fastest stretch; 0 where only the whole is known.
    """

    phase: str
    label: str | None
    start: float
    end: float = float("inf")
    progress: Progress | None = None
    unit: str = "B"
    nbytes: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        return self.phase if self.label is None else f"{self.phase} {self.label}"

    @property
    def ended(self) -> bool:
        return self.end < float("inf")


class Spans:
    """A list of spans, which several threads may begin and end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[Span, None] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: the spans that have ended. A lock, and a span that goes on, belong to their process."""
        with self._lock:
            return {**vars(self), "_lock": None, "_spans": {span: None for span in self._spans if span.ended}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def begin(
        self, phase: str, label: str | None = None, progress: Progress | None = None, unit: str = "B"
    ) -> Span:
        """Begins a span, which ``end`` takes; arguments as of ``Span``."""
        span = Span(phase, label, now(), progress=progress, unit=unit)
        self.take(span)
        return span

    def end(self, span: Span, at: float | None = None) -> None:
        """Ends a span, now or at a moment that has passed; it drops the function of its progress."""
        span.end, span.progress = now() if at is None else at, None

    @contextmanager
    def phase(
        self, name: str, label: str | None = None, progress: Progress | None = None, unit: str = "B"
    ) -> Iterator[Span]:
        """Times a block, even one that raises; arguments as of ``Span``. Blocks may overlap."""
        span = self.begin(name, label, progress, unit)
        try:
            yield span
        finally:
            self.end(span)

    def add(self, phase: str, start: float, end: float, label: str | None = None) -> None:
        """Adds a span that has ended; start and end are seconds since the process started."""
        self.take(Span(phase, label, start, end))

    def take(self, span: Span) -> None:
        """Adds a span, once."""
        with self._lock:
            self._spans[span] = None

    @property
    def running(self) -> list[Span]:
        """Spans that go on, those that began first in front."""
        with self._lock:
            return sorted((one for one in self._spans if not one.ended), key=lambda span: span.start)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges intervals into disjoint ones, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval], begin: float = 0.0, until: float = float("inf")) -> float:
    """Returns the seconds from ``begin`` to ``until`` that at least one interval covers."""
    return sum(max(min(end, until) - max(start, begin), 0.0) for start, end in union(intervals))
