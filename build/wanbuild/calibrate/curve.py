"""Draws quality over evaluations, one line for each way to make a video."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wanrun.artifact.schedules import Schedule
from wanrun.errors import UsageError

FILE = "schedules.png"
"""The drawing's name in an artifact's folder."""

TICKS = (2, 4, 6, 8, 12, 16, 20, 30, 40, 60, 80, 100, 150, 200)
"""Numbers of evaluations that the axis names."""

AXIS = "PSNR to the converged video, dB"


@dataclass(frozen=True)
class Point:
    """A mean over the number of evaluations, calls of the transformers.

    ``low`` and ``high`` are the ends of its interval; None for no interval.
    """

    evaluations: float
    value: float
    low: float | None = None
    high: float | None = None


Lines = Mapping[str, Sequence[Point]]


def of_schedules(schedules: Mapping[str, Schedule]) -> Lines:
    """Returns the lines of an artifact's schedules by name: dB against converged videos."""
    measured = [one for one in schedules.values() if "psnr" in one.measured]
    named = {"chosen": "psnr", "the solver's own steps": "plain_psnr"}
    return {
        name: [_point(one, figure) for one in sorted(measured, key=lambda one: one.evaluations)]
        for name, figure in named.items()
        if measured
    }


def _point(schedule: Schedule, figure: str) -> Point:
    found: Any = schedule.measured
    low, high = (found.get(f"{figure}_{end}") for end in ("low", "high"))
    return Point(schedule.evaluations, found[figure], low, high)


def draw(panels: Mapping[str, Lines], axis: str) -> bytes:
    """Draws one panel for each title, side by side; returns a PNG.

    ``axis`` is what is measured, with its unit. Raises UsageError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "not_installed", "the curve needs matplotlib", remedy="pip install matplotlib"
        ) from None
    figure = Figure(figsize=(5.2 * len(panels), 4.2), layout="constrained")
    for place, (title, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, len(panels), place)
        for name, points in lines.items():
            at = [point.evaluations for point in points]
            values = [point.value for point in points]
            axes.plot(at, values, marker="o", markersize=3, label=name)
            bands = [(point.low, point.high) for point in points if point.low is not None]
            if len(bands) == len(points):
                axes.fill_between(at, *zip(*bands, strict=True), alpha=0.12)  # type: ignore[arg-type]
        axes.set(title=title, xlabel="evaluations of the transformer", ylabel=axis, xscale="log")
        ends = [point.evaluations for points in lines.values() for point in points]
        ticks = [tick for tick in TICKS if min(ends) <= tick <= max(ends)]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, metadata={"Software": None})
    return buffer.getvalue()
