"""What spans of time cover together, and what none of them does."""

from __future__ import annotations

import random

import pytest

from wanrun.timing.spans import Span, gaps, length, union


def test_union_length_and_gaps() -> None:
    intervals = [(5.0, 6.0), (1.0, 3.0), (1.5, 2.0), (2.0, 4.0), (6.0, 6.5)]
    assert union(intervals) == [(1.0, 4.0), (5.0, 6.5)]
    assert length(intervals) == 4.5
    assert gaps(intervals, 8.0) == [(0.0, 1.0), (4.0, 5.0), (6.5, 8.0)]
    assert gaps(intervals, 5.5) == [(0.0, 1.0), (4.0, 5.0)]
    assert gaps(intervals, 8.0, begin=4.5) == [(4.5, 5.0), (6.5, 8.0)]
    assert gaps(intervals, 8.0, begin=7.0) == [(7.0, 8.0)]
    assert gaps(intervals, 8.0, begin=2.0) == [(4.0, 5.0), (6.5, 8.0)]
    assert (union([]), length([]), gaps([], 1.0), gaps([], 0.0)) == ([], 0, [(0.0, 1.0)], [])


def test_what_is_covered_and_what_is_not_is_all_there_is() -> None:
    rng = random.Random(1)
    for _ in range(200):
        spans = [
            (start, start + rng.random()) for start in (rng.uniform(0, 9) for _ in range(rng.randint(0, 9)))
        ]
        begin, until = rng.uniform(0, 4), rng.uniform(4, 10)
        inside = [
            (max(start, begin), min(end, until)) for start, end in spans if end > begin and start < until
        ]
        assert length(inside) + length(gaps(spans, until, begin)) == pytest.approx(until - begin)


def test_a_span_is_named_by_its_phase_and_label() -> None:
    assert Span("restore", "vae", 0, 1).name == "restore vae"
    assert Span("import", None, 0, 1).name == "import"
