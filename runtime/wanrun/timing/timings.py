"""Timing of a run or a generation: phases on the process's clock, steps, memory, cache counts."""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wanrun.timing.activities import Activities
from wanrun.timing.spans import Span, gaps, length
from wanrun.timing.trace_events import trace_events
from wanrun.units import in_bytes

_IMPORTED = time.monotonic()

PHASES = (
    "import",
    "manifest",
    "restore",
    "transfer",
    "executables",
    "text",
    "denoise",
    "decode",
    "encode_video",
)
"""The phases that are always reported, as 0 if no time was spent in them."""

_LABELS: Mapping[str, str] = MappingProxyType(
    {"denoise": "denoise total", "decode": "VAE decode", "encode_video": "encode video"}
)


def process_start_seconds_ago() -> float:
    """Returns the seconds since the kernel started this process, to 10 ms; since import if that is unknown.

    Source: proc_pid_stat(5), field 22: the start time after boot in clock ticks.
    """
    since_import = time.monotonic() - _IMPORTED
    try:
        # The second field is the command in parentheses, which may contain spaces and parentheses.
        fields = (
            Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, since_import)
    except (OSError, AttributeError, IndexError, ValueError):
        return since_import


def peak_rss_bytes() -> int:
    """Returns this process's peak resident memory in bytes; 0 if the system does not report it."""
    try:
        # getrusage is only the fallback: on Linux its maximum starts with that of the parent process.
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


_ORIGIN = time.monotonic() - process_start_seconds_ago()


def now() -> float:
    """Returns the seconds since the process started: the clock of all timings."""
    return time.monotonic() - _ORIGIN


class Timings:
    """Collects durations; thread-safe.

    Args:
        begin: when the timed work begins, in seconds since the process started. The total and the unaccounted
            time count from there; all other times are on the process's clock.

    Attributes:
        cache_hits: executables loaded from the compilation cache.
        cache_misses: executables that had to be compiled.
        restore_bytes: bytes of weights that were read from storage.
        placement: where the parameters of two experts are: ``both`` on the device, one there and the other in
            ``host`` memory, or ``one`` read at a time; None for a model with one transformer.
        activities: what is going on now.
    """

    def __init__(self, begin: float = 0.0) -> None:
        self.activities = Activities()
        self._begin = begin
        self._end: float | None = None
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._steps: list[float] = []
        self._calls: list[Span] = []
        self._loop: str | None = None
        self._marks: dict[str, float] = {}
        self.cache_hits = 0
        self.cache_misses = 0
        self.restore_bytes = 0
        self.placement: str | None = None

    def now(self) -> float:
        """Returns the seconds since the process started."""
        return now()

    @classmethod
    def from_now(cls) -> Timings:
        """Returns timings of work that begins now, in a process that may have started long ago."""
        return cls(now())

    def stop(self) -> None:
        """Ends the total: later time does not count."""
        self._end = self.now()

    @contextmanager
    def phase(self, name: str, label: str | None = None) -> Iterator[None]:
        """Times a block, even one that raises. Phases may overlap, in one thread or several.

        Args:
            name: the phase's name, such as ``restore``.
            label: the object of the phase, such as ``transformer``, if there are several.
        """
        start = self.now()
        try:
            with self.activities.during(name, label):
                yield
        finally:
            self.add(name, start, self.now(), label)

    def add(self, name: str, start: float, end: float, label: str | None = None) -> None:
        """Adds a span to a phase; start and end are seconds since the process started."""
        with self._lock:
            self._spans.append(Span(name, label, start, end))

    def count_cache(self, hits: int = 0, misses: int = 0) -> None:
        """Adds executables loaded from the compilation cache, and executables that had to be compiled."""
        with self._lock:
            self.cache_hits += hits
            self.cache_misses += misses

    def count_restored(self, nbytes: int) -> None:
        """Adds bytes of weights that were read from storage."""
        with self._lock:
            self.restore_bytes += nbytes

    def step(self, seconds: float) -> None:
        """Adds one denoising step of the step form, synchronised with the device."""
        self._add_steps("step", 1, seconds)

    def steps(self, count: int, seconds: float) -> None:
        """Adds one call of the scan form, synchronised with the device.

        Args:
            count: the number of steps in the call, at least 1. Each is recorded with their mean.
            seconds: the duration of the call.
        """
        self._add_steps("scan", count, seconds)

    def _add_steps(self, loop: str, count: int, seconds: float) -> None:
        end = self.now()
        with self._lock:
            self._loop = loop
            first = len(self._steps) + 1
            self._steps += [seconds / count] * count
            label = str(first) if count == 1 else f"{first} to {len(self._steps)}"
            self._calls.append(Span("step", label, end - seconds, end))

    def mark_ready(self) -> None:
        """Marks the moment when the first step can be dispatched; later calls change nothing."""
        self._mark("process_to_ready_seconds")

    def mark_first_step(self) -> None:
        """Marks the end of the first step, in the scan form of the first call; later calls change nothing."""
        self._mark("process_to_first_step_seconds")

    def _mark(self, name: str) -> None:
        with self._lock:
            self._marks.setdefault(name, self.now())

    @property
    def labelled_spans(self) -> list[Span]:
        """Every span so far, ordered by start."""
        with self._lock:
            return sorted(self._spans, key=lambda span: (span.start, span.end))

    @property
    def spans(self) -> Mapping[str, list[tuple[float, float]]]:
        """(start, end) of every span by phase, in seconds since the process started."""
        spans: dict[str, list[tuple[float, float]]] = {}
        with self._lock:
            for span in self._spans:
                spans.setdefault(span.phase, []).append((span.start, span.end))
        return spans

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall time of each recorded phase; overlapping spans count once."""
        return {name: length(spans) for name, spans in self.spans.items()}

    @property
    def unaccounted_seconds(self) -> float | None:
        """Time until the end of the first step that no span covers; None before that moment."""
        until = self._marks.get("process_to_first_step_seconds")
        if until is None:
            return None
        return length(gaps(((span.start, span.end) for span in self.labelled_spans), until, self._begin))

    @property
    def loop_overhead_seconds(self) -> float | None:
        """The Python loop's mean time per denoising step, besides the synchronised execution.

        In the scan form it is the time per call, spread over its steps. None without steps, or if some of
        them ran outside the phase ``denoise``.
        """
        steps, denoise = self.step_seconds, self.seconds.get("denoise", 0.0)
        return (denoise - sum(steps)) / len(steps) if steps and denoise >= sum(steps) else None

    @property
    def step_seconds(self) -> list[float]:
        """The denoising steps so far; the steps of one scan call have equal times."""
        with self._lock:
            return list(self._steps)

    @property
    def loop(self) -> str | None:
        """The form of the denoising loop of the latest steps; None before any steps."""
        with self._lock:
            return self._loop

    def as_json(self) -> dict[str, Any]:
        """Returns a flat object with stable keys: a phase without spans is 0, a moment not reached is None.

        If ``loop`` is ``scan``, ``process_to_first_step_seconds`` is the end of the first call, and each
        entry of ``step_seconds`` is the mean of its call. ``placement`` is the attribute. ``spans`` lists
        every span as [phase or "phase label", start, end], ordered by start.
        """
        seconds = self.seconds
        names = [*PHASES, *sorted(seconds.keys() - set(PHASES))]
        return {
            **{f"{name}_seconds": seconds.get(name, 0.0) for name in names},
            "process_to_ready_seconds": self._marks.get("process_to_ready_seconds"),
            "process_to_first_step_seconds": self._marks.get("process_to_first_step_seconds"),
            "unaccounted_seconds": self.unaccounted_seconds,
            "loop": self.loop,
            "placement": self.placement,
            "step_seconds": self.step_seconds,
            "loop_overhead_seconds": self.loop_overhead_seconds,
            "total_seconds": (self.now() if self._end is None else self._end) - self._begin,
            "cache_hits": self.cache_hits,
            "cache_misses": self.cache_misses,
            "restore_bytes": self.restore_bytes,
            "peak_rss_bytes": peak_rss_bytes(),
            "spans": [[span.name, span.start, span.end] for span in self.labelled_spans],
        }

    def summary(self) -> str:
        """Returns the TIMING SUMMARY table. Phases may overlap, so they need not add up to the total."""
        values = self.as_json()
        rows: list[tuple[str, str]] = []
        for key in values:
            name = key.removesuffix("_seconds")
            if name in self.seconds or name in PHASES:
                rows.append((_LABELS.get(name, name.replace("_", " ")), f"{values[key]:9.2f} s"))
            if name == "denoise" and values["step_seconds"]:
                steps = values["step_seconds"]
                if values["loop"] == "scan":
                    rows.append(("  mean step", f"{statistics.fmean(steps):9.2f} s  of {len(steps)}"))
                else:
                    rows.append(("  first step", f"{steps[0]:9.2f} s"))
                    rows.append(("  median step", f"{statistics.median(steps):9.2f} s  of {len(steps)}"))
                    if (overhead := values["loop_overhead_seconds"]) is not None:
                        rows.append(("  between steps", f"{overhead * 1e3:9.2f} ms each"))
        for name in ("process_to_ready", "process_to_first_step", "unaccounted"):
            if values[f"{name}_seconds"] is not None:
                rows.append((name.replace("_", " "), f"{values[f'{name}_seconds']:9.2f} s"))
        rows.append(("total", f"{values['total_seconds']:9.2f} s"))
        rows.append(("peak RSS", f"{in_bytes(values['peak_rss_bytes']):>12}"))
        if values["placement"] is not None:
            rows.append(("placement", f"{values['placement']:>9}"))
        rows.append(("cache", f"{self.cache_hits:9d} hits, {self.cache_misses} misses"))
        width = max(len(label) for label, _ in rows)
        table = [f"  {label:<{width}}  {value}" for label, value in rows]
        return "\n".join(["TIMING SUMMARY", *table])

    def as_trace(self) -> dict[str, Any]:
        """Returns every span and step as a trace, and the moments ``ready`` and ``first step``."""
        with self._lock:
            spans, marks = [*self._spans, *self._calls], dict(self._marks)
        moments = {"process_to_ready_seconds": "ready", "process_to_first_step_seconds": "first step"}
        return trace_events(spans, {moments[name]: moment for name, moment in marks.items()})


class Recorder:
    """Passes background work on to the timings of every running generation, and stores nothing itself.

    Several generations may wait for the same load: it is recorded in each of them.
    """

    def __init__(self) -> None:
        self.activities = Activities()
        self._lock = threading.Lock()
        self._listening: list[Timings] = []

    @contextmanager
    def into(self, timings: Timings) -> Iterator[None]:
        """Records spans that end while the block runs in these timings too."""
        with self._lock:
            self._listening.append(timings)
        try:
            with timings.activities.beside(self.activities):
                yield
        finally:
            with self._lock:
                self._listening.remove(timings)

    def _timings(self) -> list[Timings]:
        """Returns the listening timings, each once."""
        with self._lock:
            return list(dict.fromkeys(self._listening))

    @contextmanager
    def phase(self, name: str, label: str | None = None) -> Iterator[None]:
        """Times a block, like ``Timings.phase``."""
        start = now()
        try:
            with self.activities.during(name, label):
                yield
        finally:
            self.add(name, start, now(), label)

    def add(self, name: str, start: float, end: float, label: str | None = None) -> None:
        """Adds a span to a phase, like ``Timings.add``."""
        for timings in self._timings():
            timings.add(name, start, end, label)

    def count_cache(self, hits: int = 0, misses: int = 0) -> None:
        """Adds executables, like ``Timings.count_cache``."""
        for timings in self._timings():
            timings.count_cache(hits, misses)

    def count_restored(self, nbytes: int) -> None:
        """Adds bytes read, like ``Timings.count_restored``."""
        for timings in self._timings():
            timings.count_restored(nbytes)
