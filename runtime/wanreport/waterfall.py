"""A waterfall: from spans of time to bars, and from bars to SVG.

Each row of the table has its own drawing, in shares of its width. So it fits a telephone and a sheet of
paper, and its text is as large as the rest of the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile

from wanreport.report import Bar, Waterfall

LOADING = frozenset(
    {"import", "manifest", "check", "join", "device", "restore", "transfer", "executables", "media", "trial"}
)
"""The phases of a run that come before its work."""

NARROWEST = 0.3
"""In hundredths of the width: what is shorter is still seen. Gaps below it are not drawn."""

TICKS = 7
"""The approximate number of ticks of the scale."""

HEIGHT, THICKNESS = 26, 12
"""The heights of a row and of its bar, in CSS pixels."""


def waterfall(
    spans: Iterable[tuple[str, float, float]], end: float, marks: Sequence[tuple[str, float | None]] = ()
) -> Waterfall:
    """Returns the waterfall of a run from 0 to ``end`` seconds.

    ``spans`` are (name, start, end) in seconds; a name begins with its phase. ``marks`` are moments by name;
    those that are None were not reached.
    """
    parts: dict[str, list[tuple[float, float]]] = {}
    for name, start, stop in sorted(spans, key=lambda span: span[1]):
        if start < end and stop > 0:
            parts.setdefault(name, []).append((max(start, 0.0), min(stop, end)))
    gap = end * NARROWEST / 100
    bars = (Bar(name, joined(parts[name], gap), name.partition(" ")[0] in LOADING) for name in parts)
    return Waterfall(tuple(bars), 0.0, end, tuple((name, at) for name, at in marks if at is not None))


def joined(intervals: Iterable[tuple[float, float]], gap: float) -> tuple[tuple[float, float], ...]:
    """Returns intervals in order, those joined that overlap or are at most ``gap`` seconds apart."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return tuple(found)


def seconds(bar: Bar) -> float:
    """Returns the duration of a part, in seconds."""
    return sum(end - start for start, end in bar.intervals)


def ticks(begin: float, end: float) -> list[float]:
    """Returns the seconds that the scale names: multiples of 1, 2 or 5 times a power of ten."""
    rough = (end - begin) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(begin / step)
    numbers = (round((first + index) * step, 9) for index in range(4 * TICKS))
    return list(takewhile(lambda number: number <= end, numbers))


def scale(chart: Waterfall) -> str:
    """Returns the SVG of the scale above the rows."""
    texts = []
    for index, number in enumerate(ticks(chart.begin, chart.end)):
        share = _share(chart, number)
        anchor = "start" if share < 4 else "end" if share > 94 else "middle"
        kind = ' class="more"' if index % 3 else ""  # a telephone shows every third number
        texts.append(f'<text{kind} x="{share:.2f}%" y="14" text-anchor="{anchor}">{number:g} s</text>')
    return _svg(20, "".join(texts))


def drawing(chart: Waterfall, bar: Bar) -> str:
    """Returns the SVG of a row: the scale's lines, the moments, and the bar."""
    lines = [_line("grid", _share(chart, number)) for number in ticks(chart.begin, chart.end)]
    lines += [_line("mark", _share(chart, at)) for _, at in chart.marks]
    return _svg(HEIGHT, "".join([*lines, *(_rectangle(chart, bar, *interval) for interval in bar.intervals)]))


def _rectangle(chart: Waterfall, bar: Bar, start: float, end: float) -> str:
    wide = max(_share(chart, end) - _share(chart, start), NARROWEST)
    left, top = min(_share(chart, start), 100 - wide), (HEIGHT - THICKNESS) // 2
    return (
        f'<rect class="{"loading" if bar.loading else "work"}" x="{left:.2f}%" y="{top}" rx="2" '
        f'width="{wide:.2f}%" height="{THICKNESS}"><title>{start:.2f} to {end:.2f} s</title></rect>'
    )


def _share(chart: Waterfall, at: float) -> float:
    """Returns where a moment is, in hundredths of the width."""
    return 100 * (at - chart.begin) / (chart.end - chart.begin)


def _line(kind: str, share: float) -> str:
    return f'<line class="{kind}" x1="{share:.2f}%" x2="{share:.2f}%" y1="0" y2="{HEIGHT}"/>'


def _svg(height: int, content: str) -> str:
    hidden = 'aria-hidden="true" focusable="false"'  # the table has the names and the times
    return f'<svg class="row" width="100%" height="{height}" {hidden}>{content}</svg>'
