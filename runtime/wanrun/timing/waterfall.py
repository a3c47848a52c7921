"""A picture of when each part of a run took place, in characters."""

from __future__ import annotations

from collections.abc import Iterable

from wanrun.timing.spans import Span, union

WIDTH = 60
"""The most characters that the whole run is wide."""


def waterfall(spans: Iterable[Span], begin: float, end: float, columns: int | None = None) -> list[str]:
    """Returns a line for each part of a run, those that began first in front, and the scale.

    Args:
        spans: what took place, in seconds.
        begin: where the picture begins, in seconds.
        end: where it ends.
        columns: the width of the terminal, if it is one.
    """
    parts: dict[str, list[tuple[float, float]]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        if span.end > begin and span.start < end:
            parts.setdefault(span.name, []).append((span.start, span.end))
    if not parts or end <= begin:
        return []
    wide = max(map(len, parts))
    width = WIDTH if columns is None else max(min(WIDTH, columns - wide - 5), 10)
    scale = width / (end - begin)
    lines = ["WATERFALL"]
    for name, intervals in parts.items():
        bar = [" "] * width
        for start, stop in union(intervals):
            first = min(int(max(start - begin, 0) * scale), width - 1)
            last = max(first, min(round((stop - begin) * scale), width) - 1)
            bar[first : last + 1] = "█" * (last + 1 - first)
        lines.append(f"  {name:<{wide}}  {''.join(bar).rstrip()}")
    left = f"{begin:.1f} s"
    lines.append(f"  {'':<{wide}}  {left}{f'{end:.1f} s':>{width - len(left)}}")
    return lines
