"""When each part of a run took place."""

from __future__ import annotations

from wanrun.timing.spans import Span
from wanrun.timing.waterfall import WIDTH, waterfall


def test_bars_are_where_the_spans_are() -> None:
    spans = [
        Span("denoise", None, 5.0, 9.0),
        Span("restore", "vae", 2.0, 2.01),
        Span("restore", "vae", 3.0, 4.0),
        Span("import", None, 0.0, 1.0),
        Span("decode", None, 9.0, 10.0),
        Span("later", None, 10.0, 12.0),
    ]
    title, *bars, scale = waterfall(spans, 0.0, 10.0)
    assert title == "WATERFALL"
    names = [line[2:13].rstrip() for line in bars]
    assert names == ["import", "restore vae", "denoise", "decode"]
    shown = [line[15:] for line in bars]
    assert shown[0] == "█" * 6
    assert shown[1] == " " * 12 + "█" + " " * 5 + "█" * 6
    assert shown[2] == " " * 30 + "█" * 24
    assert shown[3] == " " * 54 + "█" * 6
    assert len(scale) == 15 + WIDTH and scale.split() == ["0.0", "s", "10.0", "s"]


def test_a_part_that_began_before_is_cut() -> None:
    _, bar, _ = waterfall([Span("import", None, 0.0, 6.0)], 5.0, 10.0)
    assert bar == "  import  " + "█" * 12


def test_a_narrow_terminal() -> None:
    spans = [Span("executables encode_text_64", None, 0.0, 6.0), Span("import", None, 0.0, 1.0)]
    assert {len(line) <= 59 for line in waterfall(spans, 0.0, 6.0, 60)} == {True}
    assert max(map(len, waterfall(spans, 0.0, 6.0, 200))) == len("  executables encode_text_64  ") + WIDTH


def test_nothing_has_no_picture() -> None:
    assert waterfall([], 0.0, 1.0) == []
    assert waterfall([Span("a", None, 0.0, 1.0)], 1.0, 1.0) == []
