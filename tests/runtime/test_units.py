"""Quantities in the unit that fits."""

from __future__ import annotations

import pytest

from wanrun.units import in_bytes, in_hours, scaled


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_940, "99.9 kB"),
        (99_960, "100 kB"),
        (999_400, "999 kB"),
        (999_600, "1.00 MB"),
        (3_280_000_000, "3.28 GB"),
        (50e9, "50.0 GB"),
        (7.5e18, "7500 PB"),
    ],
)
def test_bytes(number: float, text: str) -> None:
    assert in_bytes(number) == text


def test_other_units() -> None:
    assert scaled(7.6e12, "FLOP") == "7.60 TFLOP"
    assert scaled(0.25, "B/s") == "0.25 B/s"
    assert scaled(38_400_000, "B/s") == "38.4 MB/s"


@pytest.mark.parametrize(
    ("seconds", "text"), [(1200, "20 min"), (5399, "90 min"), (9000, "2.5 h"), (39600, "11 h")]
)
def test_hours(seconds: float, text: str) -> None:
    assert in_hours(seconds) == text
