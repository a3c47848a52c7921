"""What stages of a start take at least, by their bytes and the fastest rate that was seen."""

from __future__ import annotations

import pytest

from wanrun.timing.floors import Floor, fastest, floors, rates, start_floor
from wanrun.timing.spans import Span

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
