"""Converts spans to a file for ui.perfetto.dev: JSON in Chrome's Trace Event Format.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from wanrun.timing.spans import Span

_PROCESS = 1
"""The process id of a trace's only process."""


def trace_events(spans: Iterable[Span], marks: Mapping[str, float]) -> dict[str, Any]:
    """Returns a trace with a row per phase, ordered by the phases' first spans.

    A viewer shows overlapping events of one row as nested. So a phase whose spans overlap, in threads, has
    several rows: ``restore``, ``restore 2``.

    Args:
        spans: spans in any order.
        marks: moments by name, in seconds since the process started.

    Returns:
        A JSON object. Times are in microseconds since the process started.
    """
    placed = list(_in_rows(sorted(spans, key=lambda span: (span.start, span.end))))
    order = {phase: index for index, phase in enumerate(dict.fromkeys(span.phase for span, _ in placed))}
    rows = sorted({(order[span.phase], number, span.phase) for span, number in placed})
    threads = {(phase, number): thread for thread, (_, number, phase) in enumerate(rows, 1)}
    events = [_metadata("process_name", 0, "wanrun")]
    for (phase, number), thread in threads.items():
        events.append(_metadata("thread_name", thread, phase if number == 1 else f"{phase} {number}"))
        events.append(_metadata("thread_sort_index", thread, thread))
    for span, number in placed:
        times = {"ts": _microseconds(span.start), "dur": _microseconds(span.end - span.start)}
        place = _place(threads[span.phase, number])
        events.append({"name": span.name, "cat": span.phase, "ph": "X", **times, **place})
    for name, moment in sorted(marks.items(), key=lambda mark: mark[1]):
        events.append({"name": name, "ph": "i", "s": "g", "ts": _microseconds(moment), **_place(0)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _in_rows(spans: Iterable[Span]) -> Iterator[tuple[Span, int]]:
    """Yields each span, ordered by start, with the number of its phase's first row that is free by then."""
    ends: dict[tuple[str, int], float] = {}
    for span in spans:
        number = 1
        while ends.get((span.phase, number), span.start) > span.start:
            number += 1
        ends[span.phase, number] = span.end
        yield span, number


def _place(thread: int) -> dict[str, int]:
    return {"pid": _PROCESS, "tid": thread}


def _metadata(kind: str, thread: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if kind == "thread_sort_index" else "name"
    return {"name": kind, "ph": "M", **_place(thread), "args": {key: value}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
