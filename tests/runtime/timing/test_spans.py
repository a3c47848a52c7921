"""A list of spans, some of which go on; what spans of time cover together."""

from __future__ import annotations

import random

import pytest

from wanrun.timing.spans import Span, Spans, length, union


def names(spans: Spans) -> list[tuple[str, str | None]]:
    return [(one.phase, one.label) for one in spans.running]


def test_spans_begin_and_end() -> None:
    spans = Spans()
    with spans.phase("text"):
        reading = spans.begin("restore", "vae", lambda: (1, 2))
        assert names(spans) == [("text", None), ("restore", "vae")]
        assert spans.running[1].progress is not None and spans.running[1].progress() == (1, 2)
    assert names(spans) == [("restore", "vae")] and not reading.ended
    spans.end(reading)
    assert names(spans) == [] and 0 < reading.start <= reading.end


def test_an_error_ends_a_span() -> None:
    spans = Spans()
    with pytest.raises(ValueError, match="x"), spans.phase("text"):
        raise ValueError("x")
    assert names(spans) == []


def test_union_and_length() -> None:
    intervals = [(5.0, 6.0), (1.0, 3.0), (1.5, 2.0), (2.0, 4.0), (6.0, 6.5)]
    assert union(intervals) == [(1.0, 4.0), (5.0, 6.5)]
    assert length(intervals) == 4.5
    assert [length(intervals, begin) for begin in (2.0, 4.5, 7.0)] == [3.5, 1.5, 0]
    assert [length(intervals, 2.0, until) for until in (3.0, 5.5, 8.0)] == [1.0, 2.5, 3.5]
    assert (union([]), length([])) == ([], 0)


@pytest.mark.slow
def test_what_is_covered_is_what_is_covered_inside() -> None:
    rng = random.Random(1)
    for _ in range(200):
        starts = [rng.uniform(0, 9) for _ in range(rng.randint(0, 9))]
        spans = [(start, start + rng.random()) for start in starts]
        begin, until = rng.uniform(0, 4), rng.uniform(4, 10)
        moments = [begin + (until - begin) * (index + 0.5) / 4000 for index in range(4000)]
        covered = sum(any(start <= moment < end for start, end in spans) for moment in moments) / 4000
        assert length(spans, begin, until) == pytest.approx((until - begin) * covered, abs=0.05)


def test_a_span_is_named_by_its_phase_and_label() -> None:
    assert Span("restore", "vae", 0, 1).name == "restore vae"
    assert Span("import", None, 0, 1).name == "import"
