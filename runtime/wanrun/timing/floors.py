"""The least seconds of the stages of a start: their bytes over the fastest rate that was seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from wanrun.timing.spans import Span, length
from wanrun.units import in_bytes

MOVING: Mapping[str, int] = MappingProxyType(
    {"restore": 64 * 10**6, "transfer": 64 * 10**6, "executables": 1}
)
"""The phases that move bytes, and how many bytes show what the machine can do."""

ONE_AFTER_ANOTHER = (("restore", "transfer"), ("executables",))
"""Chains of these phases, which run beside each other once JAX is imported."""


@dataclass(frozen=True)
class Floor:
    """The least time of a phase: its bytes at the fastest rate, in bytes/s, seen of such a phase."""

    nbytes: int
    rate: float

    @property
    def seconds(self) -> float:
        return self.nbytes / self.rate

    def __str__(self) -> str:
        return f"at least {self.seconds:.2f} s, {in_bytes(self.nbytes)} at {in_bytes(int(self.rate))}/s"


def fastest(marks: Sequence[tuple[float, int]], least: float) -> float:
    """Returns the highest rate, in bytes/s, of a stretch with at least ``least`` bytes; 0 if there is none.

    ``marks`` are moments in seconds, and how many bytes had come by then, both rising; ``least`` is more than
    0.
    """
    best, first = 0.0, 0
    for moment, done in marks:
        while done - marks[first][1] >= least:
            came = done - marks[first][1]
            best, first = max(best, came / max(moment - marks[first][0], 1e-6)), first + 1
    return best


def rates(spans: Iterable[Span]) -> dict[str, float]:
    """Returns the highest bytes a second by phase, of one span or of all, where there were enough bytes."""
    found: dict[str, float] = {}
    for phase, moved in _moving(spans).items():
        nbytes = sum(span.nbytes for span in moved)
        tries = [(nbytes, nbytes / max(length((span.start, span.end) for span in moved), 1e-6))]
        for span in moved:
            tries.append((span.nbytes, max(span.rate, span.nbytes / max(span.end - span.start, 1e-6))))
        if enough := [rate for nbytes, rate in tries if nbytes >= MOVING[phase]]:
            found[phase] = max(enough)
    return found


def floors(spans: Iterable[Span], known: Mapping[str, float]) -> dict[str, Floor]:
    """Returns the floor of every phase that moved bytes and whose rate was seen; none is above its time.

    The spans have ended; ``known`` are bytes/s of earlier runs, by phase.
    """
    spans = list(spans)
    seen, moving = rates(spans), _moving(spans)
    best = {phase: max(seen.get(phase, 0.0), known.get(phase, 0.0)) for phase in moving}
    return {
        phase: Floor(sum(span.nbytes for span in moving[phase]), rate) for phase, rate in best.items() if rate
    }


def _moving(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Returns the spans that moved bytes by phase."""
    moving: dict[str, list[Span]] = {}
    for span in spans:
        if span.phase in MOVING and span.nbytes:
            moving.setdefault(span.phase, []).append(span)
    return moving


def start_floor(spans: Iterable[Span], known: Mapping[str, float], ready: float) -> float:
    """Returns the least seconds until ``ready``: the imports, then the longest of the chains of phases.

    ``ready`` is the moment when the first step could be dispatched, in seconds since the process started; the
    other arguments are those of ``floors``.
    """
    before = [span for span in spans if span.end <= ready]
    found = floors(before, known)
    chains = (sum(found[phase].seconds for phase in chain if phase in found) for chain in ONE_AFTER_ANOTHER)
    return length((span.start, span.end) for span in before if span.phase == "import") + max(chains)
