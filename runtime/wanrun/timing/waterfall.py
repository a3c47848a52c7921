"""A picture of when each part of a run took place, in characters."""

from __future__ import annotations

from collections.abc import Iterable

from wanrun.timing.spans import Span, union

WIDTH = 60
"""Characters that the whole run is wide."""


def waterfall(spans: Iterable[Span], begin: float, end: float) -> list[str]:
    """Returns a line for each part of a run, those that began first in front, and the scale.

    Args:
        spans: what took place, in seconds.
        begin: where the picture begins, in seconds.
        end: where it ends.
    """
    parts: dict[str, list[tuple[float, float]]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        if span.end > begin and span.start < end:
            parts.setdefault(span.name, []).append((span.start, span.end))
    if not parts or end <= begin:
        return []
    wide, scale = max(map(len, parts)), WIDTH / (end - begin)
    lines = ["WATERFALL"]
    for name, intervals in parts.items():
        bar = [" "] * WIDTH
        for start, stop in union(intervals):
            first = min(int(max(start - begin, 0) * scale), WIDTH - 1)
            last = max(first, min(round((stop - begin) * scale), WIDTH) - 1)
            bar[first : last + 1] = "█" * (last + 1 - first)
        lines.append(f"  {name:<{wide}}  {''.join(bar).rstrip()}")
    left = f"{begin:.1f} s"
    lines.append(f"  {'':<{wide}}  {left}{f'{end:.1f} s':>{WIDTH - len(left)}}")
    return lines
