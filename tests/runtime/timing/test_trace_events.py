"""A trace of anything: every span once, rows by phase, and none in which two spans overlap."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

from wanrun.timing.spans import Span
from wanrun.timing.trace_events import trace_events


def rows(trace: dict[str, Any]) -> dict[int, str]:
    """The names of the rows, by their numbers, in their order."""
    names, order = {}, {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        if event["ph"] == "M" and event["name"] == "thread_sort_index":
            order[event["tid"]] = event["args"]["sort_index"]
    assert order.keys() == names.keys()
    return {thread: names[thread] for thread in sorted(names, key=order.__getitem__)}


def events(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def test_the_format() -> None:
    spans = [Span("restore", "vae", 0.5, 2.0), Span("import", None, 0.0, 1.25)]
    assert trace_events(spans, {"ready": 1.5}) == {
        "traceEvents": [
            {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "wanrun"}},
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "import"}},
            {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": 1, "args": {"sort_index": 1}},
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": 2, "args": {"name": "restore"}},
            {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": 2, "args": {"sort_index": 2}},
            {"name": "import", "cat": "import", "ph": "X", "ts": 0.0, "dur": 1250000.0, "pid": 1, "tid": 1},
            {
                "name": "restore vae",
                "cat": "restore",
                "ph": "X",
                "ts": 500000.0,
                "dur": 1500000.0,
                "pid": 1,
                "tid": 2,
            },
            {"name": "ready", "ph": "i", "s": "g", "ts": 1500000.0, "pid": 1, "tid": 0},
        ],
        "displayTimeUnit": "ms",
    }


def test_a_phase_has_as_many_rows_as_it_needs() -> None:
    spans = [
        Span("restore", "text_encoder", 0.0, 2.0),
        Span("restore", "transformer", 1.0, 4.0),  # overlaps the first
        Span("denoise", None, 1.0, 2.0),
        Span("restore", "vae", 2.0, 3.0),  # begins when the first ends
        Span("restore", "image_encoder", 2.5, 2.5),
    ]
    trace = trace_events(spans, {})
    named = rows(trace)
    assert list(named.values()) == ["restore", "restore 2", "restore 3", "denoise"]
    assert {event["name"]: named[event["tid"]] for event in events(trace, "X")} == {
        "restore text_encoder": "restore",
        "restore transformer": "restore 2",
        "denoise": "denoise",
        "restore vae": "restore",
        "restore image_encoder": "restore 3",
    }


def test_nothing() -> None:
    assert events(trace_events([], {}), "X") == []


def test_anything() -> None:
    rng = random.Random(0)
    for count in [1, *range(2, 60, 3)]:
        spans = []
        for _ in range(count):
            start = rng.choice([0.0, rng.expovariate(1), rng.expovariate(1e-4)])
            end = start + rng.choice([0.0, rng.expovariate(1e3), rng.expovariate(1e-3)])
            phase = rng.choice(["restore", "text", "denoise", "a_name_of_great_length_" * 3])
            spans.append(Span(phase, rng.choice([None, "vae", "日本語"]), start, end))
        trace = json.loads(json.dumps(trace_events(spans, {"ready": 3.0, "first step": 1e4})))
        found = events(trace, "X")
        expected = sorted((span.name, span.start, span.end) for span in spans)
        for event, (name, start, end) in zip(
            sorted(found, key=lambda event: (event["name"], event["ts"], event["dur"])), expected, strict=True
        ):
            assert event["name"] == name
            assert abs(event["ts"] - start * 1e6) < 1e-3 and abs(event["dur"] - (end - start) * 1e6) < 1e-2
        named = rows(trace)
        for thread, name in named.items():
            own = sorted((e["ts"], e["ts"] + e["dur"]) for e in found if e["tid"] == thread)
            assert own and {e["cat"] for e in found if e["tid"] == thread} == {name.rstrip(" 0123456789")}
            assert all(later >= end - 1e-2 for (_, end), (later, _) in pairwise(own))
        assert len(events(trace, "i")) == 2
