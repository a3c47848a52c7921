"""Time spans, and the time that several of them cover together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Interval = tuple[float, float]


class Span(NamedTuple):
    """A named stretch of time, in seconds since the process started.

    Attributes:
        phase: the kind of work.
        label: the object of the work, or None.
        start: when it began.
        end: when it ended.
    """

    phase: str
    label: str | None
    start: float
    end: float

    @property
    def name(self) -> str:
        return self.phase if self.label is None else f"{self.phase} {self.label}"


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges intervals into disjoint ones, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Returns the seconds that at least one interval covers."""
    return sum(end - start for start, end in union(intervals))


def gaps(intervals: Iterable[Interval], until: float, begin: float = 0.0) -> list[Interval]:
    """Returns the intervals between ``begin`` and ``until`` that no interval covers."""
    found, reached = [], begin
    for start, end in union(intervals):
        if start >= until:
            break
        if start > reached:
            found.append((reached, start))
        reached = max(reached, end)
    if reached < until:
        found.append((reached, until))
    return found
