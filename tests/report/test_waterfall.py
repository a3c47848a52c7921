"""Spans of time become bars within the drawing, and a scale of round numbers."""

from __future__ import annotations

import re

import pytest

from wanreport.waterfall import NARROWEST, drawing, joined, scale, seconds, ticks, waterfall


def test_bars_are_in_the_order_of_their_beginning() -> None:
    spans = [("denoise", 2.0, 3.0), ("import", 0.0, 1.0), ("restore vae", 1.0, 2.5), ("denoise", 3.5, 4.0)]
    chart = waterfall(spans, 4.0, [("ready", 1.5), ("first step", None)])
    assert [(bar.name, bar.loading) for bar in chart.bars] == [
        ("import", True),
        ("restore vae", True),
        ("denoise", False),
    ]
    assert chart.bars[2].intervals == ((2.0, 3.0), (3.5, 4.0)) and seconds(chart.bars[2]) == 1.5
    assert chart.marks == (("ready", 1.5),)


def test_what_lies_outside_is_cut_off() -> None:
    chart = waterfall([("early", -2.0, -1.0), ("late", 5.0, 6.0), ("long", -1.0, 9.0)], 4.0)
    assert [(bar.name, bar.intervals) for bar in chart.bars] == [("long", ((0.0, 4.0),))]


def test_intervals_that_touch_are_one() -> None:
    assert joined([(3, 4), (0, 1), (0.5, 2), (2.1, 2.5)], 0.2) == ((0, 2.5), (3, 4))


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (0.07, [0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07]),
        (3.13, [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]),
        (100.0, [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]),
        (86400.0, [0.0, 20000.0, 40000.0, 60000.0, 80000.0]),
    ],
)
def test_the_scale_has_round_numbers(end: float, expected: list[float]) -> None:
    assert ticks(0.0, end) == expected
    texts = re.findall(r">([\d.e+]+) s</text>", scale(waterfall([], end)))
    assert list(map(float, texts)) == expected


def test_a_drawing_stays_inside_and_short_work_is_seen() -> None:
    chart = waterfall(
        [("decode", 9.99, 10.0), ("text", 0.0, 0.001), ("denoise", 2.0, 9.0)], 10.0, [("ready", 2.0)]
    )
    for bar in chart.bars:
        svg = drawing(chart, bar)
        (rectangle,) = re.findall(r'<rect [^>]*x="([\d.]+)%"[^>]*width="([\d.]+)%"', svg)
        left, wide = map(float, rectangle)
        assert wide >= NARROWEST and left >= 0 and left + wide <= 100.01
        assert '<line class="mark" x1="20.00%"' in svg
