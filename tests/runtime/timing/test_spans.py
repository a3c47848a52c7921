"""Spans of time on the process's clock, what they cover together, and what stages take at least."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wanrun.timing import clock
from wanrun.timing.clock import process_start_seconds_ago
from wanrun.timing.floors import Floor, fastest, floors, rates, start_floor
from wanrun.timing.spans import Span, Spans, length, union


def names(spans: Spans) -> list[tuple[str, str | None]]:
    return [(one.phase, one.label) for one in spans.running]


def test_spans_begin_and_end() -> None:
    """Also by an error."""
    spans = Spans()
    with pytest.raises(ValueError, match="x"), spans.phase("text"):
        reading = spans.begin("restore", "vae", lambda: (1, 2))
        assert names(spans) == [("text", None), ("restore", "vae")]
        assert spans.running[1].progress is not None and spans.running[1].progress() == (1, 2)
        raise ValueError("x")
    assert names(spans) == [("restore", "vae")] and not reading.ended
    spans.end(reading)
    assert names(spans) == [] and 0 < reading.start <= reading.end


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


# The clock.


def test_the_clock_starts_with_the_process_and_not_with_the_import() -> None:
    started = time.monotonic()
    code = "import time; time.sleep(0.3); from wanrun.timing.clock import now; print(now())"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    outside = time.monotonic() - started
    # The kernel's record has ticks of 10 ms.
    assert 0.3 - 0.02 < float(printed) < outside + 0.02


def test_without_the_kernels_record_the_clock_starts_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path, **kwargs: str) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    since_import = time.monotonic() - clock._IMPORTED
    assert process_start_seconds_ago() == pytest.approx(since_import, abs=0.05)


def test_command_names_do_not_confuse_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, expected = Path("/proc/self/stat").read_text(), process_start_seconds_ago()
    odd = plain[: plain.index("(")] + "(a) R 1 (b c)" + plain[plain.rindex(")") + 1 :]
    monkeypatch.setattr(Path, "read_text", lambda self, **kwargs: odd)
    assert process_start_seconds_ago() == pytest.approx(expected, abs=0.05)


# What stages of a start take at least.


MB, GB = 10**6, 10**9


def span(phase: str, start: float, end: float, nbytes: int = 0, rate: float = 0.0) -> Span:
    return Span(phase, None, start, end, nbytes=nbytes, rate=rate)


READS = [span("restore", 1.0, 3.0, 2 * GB, rate=4 * GB), span("restore", 2.0, 3.0, GB)]


def test_the_fastest_stretch() -> None:
    marks = [(1.0, 0), (2.0, 10), (2.5, 30), (4.0, 40), (4.0, 50)]
    assert fastest(marks, 20) == 40.0
    assert fastest(marks, 25) == 20.0
    assert fastest(marks, 60) == fastest([], 1) == 0.0


def test_a_floor_is_bytes_by_the_highest_rate() -> None:
    assert rates(READS) == {"restore": 4 * GB}
    assert floors(READS, {}) == {"restore": Floor(3 * GB, 4 * GB)}
    assert floors(READS, {"restore": 6 * GB, "transfer": GB})["restore"].seconds == 0.5
    told = str(floors(READS, {})["restore"])
    assert "0.75 s" in told and "3.00 GB" in told and "4.00 GB/s" in told


def test_no_floor_is_above_the_time() -> None:
    """Components that are read at once: none of them shows what both reach."""
    both = [span("restore", 1.0, 2.0, GB), span("restore", 1.0, 2.0, GB)]
    assert floors(both, {})["restore"].seconds == 1.0


def test_few_bytes_show_no_rate() -> None:
    small = [span("restore", 1.0, 1.5, 50 * MB), span("text", 1.0, 2.0, GB), span("executables", 1.0, 2.0)]
    assert floors(small, {}) == {}
    assert floors(small, {"restore": GB})["restore"].seconds == 0.05
    assert rates([span("executables", 1.0, 1.5, 10)]) == {"executables": 20.0}


@pytest.mark.parametrize(("known", "seconds"), [({}, 1.5 + 0.75), ({"executables": 1.0}, 1.5 + 0.75)])
def test_the_floor_of_a_start(known: dict[str, float], seconds: float) -> None:
    """The imports, and then the longer of weights and executables; what ends later does not count."""
    spans = [span("import", 0.0, 1.0), span("import", 0.5, 1.5), *READS]
    spans += [span("restore", 3.5, 9.0, GB), span("executables", 2.0, 2.5, 10), span("import", 5.0, 6.0)]
    assert start_floor(spans, known, ready=3.0) == seconds
    assert start_floor([*spans, span("executables", 2.5, 3.0, 20)], {}, ready=3.0) == seconds
    assert start_floor([], {}, ready=3.0) == 0.0
