"""Draws spans of time as rows of bars below each other, in plain ASCII, so that what overlapped shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

WIDTH = 100
"""Columns of a line."""

_LABEL_WIDTH, _NUMBER_WIDTH, _INDENT = 26, 8, 2
_BAR_WIDTH = WIDTH - _INDENT - _LABEL_WIDTH - 2 * _NUMBER_WIDTH - 4
_TICK_COLUMNS = 9
"""At least so far apart, so that their numbers fit."""

Interval = tuple[float, float]


class Span(NamedTuple):
    """A named stretch of time, in seconds since the process started.

    Attributes:
        phase: what was being done.
        label: on what, or None.
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
    """The same time as intervals that do not overlap, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Seconds that at least one of the intervals covers."""
    return sum(end - start for start, end in union(intervals))


def gaps(intervals: Iterable[Interval], until: float, begin: float = 0.0) -> list[Interval]:
    """The time from one moment until another that no interval covers."""
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


def waterfall(spans: Sequence[Span], until: float, marks: Mapping[str, float]) -> list[str]:
    """One line for each name, in the order of their beginning, on a scale from 0 to ``until``.

    The scale may end early, so that a start of seconds can be read before minutes of work: a row that goes on
    after it ends with '>', and one that begins after it says when. '#' is a column that a row filled at least
    half, '.' one that it filled less. A last row shows what no span covers on the scale.

    Args:
        spans: in any order; those of one name share a row, and count once where they overlap.
        until: seconds at the right edge.
        marks: moments to point at, by name; '->' for one after the scale.

    Returns:
        Lines of at most ``WIDTH`` characters.
    """
    rows: dict[str, list[Interval]] = {}
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        rows.setdefault(span.name, []).append((span.start, span.end))
    if until <= 0 or not rows:
        return []
    lines = [_line("", "start", "seconds", _ticks(until))]
    lines += [
        _line(name, _seconds(intervals[0][0]), _seconds(length(intervals)), _bar(union(intervals), until))
        for name, intervals in rows.items()
    ]
    idle = gaps(((span.start, span.end) for span in spans), until)
    if idle:
        lines.append(_line("unaccounted", _seconds(idle[0][0]), _seconds(length(idle)), _bar(idle, until)))
    for name, moment in sorted(marks.items(), key=lambda mark: mark[1]):
        place = " " * _column(moment, until) + "^" if moment <= until else "->"
        lines.append(_line(name, _seconds(moment), "", place))
    return lines


def _line(label: str, start: str, seconds: str, bar: str) -> str:
    label = label.replace("_", " ").encode("ascii", "replace").decode()
    if len(label) > _LABEL_WIDTH:
        label = label[: _LABEL_WIDTH - 1] + "~"
    numbers = f"{start:>{_NUMBER_WIDTH}} {seconds:>{_NUMBER_WIDTH}}"
    return f"{'':{_INDENT}}{label:<{_LABEL_WIDTH}} {numbers}  {bar}".rstrip()


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:.1f}"


def _column(moment: float, until: float) -> int:
    return min(_BAR_WIDTH - 1, int(moment / until * _BAR_WIDTH))


def _bar(intervals: Sequence[Interval], until: float) -> str:
    if intervals[0][0] >= until:
        return f"-> from {_seconds(intervals[0][0])} s, {_seconds(length(intervals))} s long"
    width = until / _BAR_WIDTH
    filled = [0.0] * _BAR_WIDTH
    for start, end in intervals:
        if start < until:
            for column in range(_column(start, until), _column(min(end, until), until) + 1):
                covered = min(end, (column + 1) * width) - max(start, column * width)
                filled[column] += max(covered, 1e-9)  # also one of no length is seen
    # A little less than a half, or rounding decides about a bar that ends in the middle of a column.
    cells = ["#" if amount >= 0.499 * width else "." if amount > 0 else " " for amount in filled]
    if intervals[-1][1] > until:
        cells[-1] = ">"
    return "".join(cells)


def _ticks(until: float) -> str:
    """Numbers at round moments, each beginning in its moment's column."""
    least = until / _BAR_WIDTH * _TICK_COLUMNS
    step = 1e-3
    while step < least:
        # 1, 2, 5, 10, 20, ...
        step *= 2.5 if f"{step:e}".startswith("2") else 2
    text = ""
    moment = 0.0
    for index in range(_BAR_WIDTH):
        moment = index * step
        if moment > until:
            break
        number = f"|{moment:g}"
        if _column(moment, until) + len(number) <= _BAR_WIDTH:
            text = text.ljust(_column(moment, until)) + number
    return text
