"""What a run or a generation spends: phases on the process's clock, steps, memory, cache counts."""

from __future__ import annotations

import json
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

from wanrun.errors import UsageError
from wanrun.files import replace_file
from wanrun.intervals import Span, gaps, length
from wanrun.trace_events import trace_events

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
"""The phases that are always reported, as 0 where nothing was spent on them."""

_LABELS: Mapping[str, str] = MappingProxyType(
    {"denoise": "denoise total", "decode": "VAE decode", "encode_video": "encode video"}
)


def process_start_seconds_ago() -> float:
    """Seconds since the kernel started this process, to 10 ms; where it does not say, since import.

    Source: proc_pid_stat(5), field 22: the start time after boot in clock ticks.
    """
    since_import = time.monotonic() - _IMPORTED
    try:
        # The second field is the command in parentheses, which may itself hold spaces and parentheses.
        fields = (
            Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, since_import)
    except (OSError, AttributeError, IndexError, ValueError):
        return since_import


def peak_rss_bytes() -> int:
    """The most memory this process has had resident so far, in bytes; 0 where the system does not say."""
    try:
        # Not getrusage where there is a choice: its maximum on Linux starts with that of the process
        # which started this one.
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
    """Seconds since the process started: the clock of all timings."""
    return time.monotonic() - _ORIGIN


class Timings:
    """Collects durations; every method may be called from any thread.

    Args:
        begin: when what is timed begins, in seconds since the process started. The total and the time that no
            span covers count from there; everything else is on the process's clock.

    Attributes:
        cache_hits: executables that came from the compilation cache.
        cache_misses: executables that had to be compiled.
        placement: where the parameters of two experts are: ``both`` on the device, one there and the other in
            ``host`` memory, or ``one`` read at a time; None for a model with one transformer.
    """

    def __init__(self, begin: float = 0.0) -> None:
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
        self.placement: str | None = None

    def now(self) -> float:
        """Seconds since the process started."""
        return now()

    @classmethod
    def from_now(cls) -> Timings:
        """Of something that begins in this moment, in a process that may be old."""
        return cls(now())

    def stop(self) -> None:
        """Ends the total: the time that passes from now on is no part of it."""
        self._end = self.now()

    @contextmanager
    def phase(self, name: str, label: str | None = None) -> Iterator[None]:
        """Times a block, also one that raises. Phases may overlap, in one thread or several.

        Args:
            name: of the phase, such as ``restore``.
            label: what it was about, such as ``transformer``, where there are several.
        """
        start = self.now()
        try:
            yield
        finally:
            self.add(name, start, self.now(), label)

    def add(self, name: str, start: float, end: float, label: str | None = None) -> None:
        """Adds a span to a phase; start and end are seconds since the process started."""
        with self._lock:
            self._spans.append(Span(name, label, start, end))

    def count_cache(self, hits: int = 0, misses: int = 0) -> None:
        """Adds executables that came from the compilation cache, and that had to be compiled."""
        with self._lock:
            self.cache_hits += hits
            self.cache_misses += misses

    def step(self, seconds: float) -> None:
        """Adds one denoising step of the step form, synchronised with the device."""
        self._add_steps("step", 1, seconds)

    def steps(self, count: int, seconds: float) -> None:
        """Adds one call of the scan form, synchronised with the device.

        Args:
            count: the steps that it took, at least 1. Each is recorded with their mean.
            seconds: how long all of them took.
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
        """The first step could be dispatched now; later calls change nothing."""
        self._mark("process_to_ready_seconds")

    def mark_first_step(self) -> None:
        """The first step has ended, in the scan form the first call; later calls change nothing."""
        self._mark("process_to_first_step_seconds")

    def _mark(self, name: str) -> None:
        with self._lock:
            self._marks.setdefault(name, self.now())

    @property
    def labelled_spans(self) -> list[Span]:
        """Every span so far, by its start."""
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
        """Wall time of each recorded phase; spans that overlap, in threads, count once."""
        return {name: length(spans) for name, spans in self.spans.items()}

    @property
    def unaccounted_seconds(self) -> float | None:
        """Of the time to the end of the first step, what no span covers; None before that."""
        until = self._marks.get("process_to_first_step_seconds")
        if until is None:
            return None
        return length(gaps(((span.start, span.end) for span in self.labelled_spans), until, self._begin))

    @property
    def loop_overhead_seconds(self) -> float | None:
        """What a denoising step takes besides its synchronised execution, on average: the loop in Python.

        In the scan form it is that of a call, spread over its steps. None without steps, or where not all of
        them were taken in the phase ``denoise``.
        """
        steps, denoise = self.step_seconds, self.seconds.get("denoise", 0.0)
        return (denoise - sum(steps)) / len(steps) if steps and denoise >= sum(steps) else None

    @property
    def step_seconds(self) -> list[float]:
        """The denoising steps so far; those of one call of the scan form are equal."""
        with self._lock:
            return list(self._steps)

    @property
    def loop(self) -> str | None:
        """The form of the denoising loop that the last steps were taken in; None before there are any."""
        with self._lock:
            return self._loop

    def as_json(self) -> dict[str, Any]:
        """One flat object with stable keys: a phase without spans is 0, a moment not reached is None.

        Where ``loop`` is ``scan``, ``process_to_first_step_seconds`` is the end of the first call, and each
        entry of ``step_seconds`` is the mean of its call. ``placement`` is as the attribute. ``spans`` lists
        every span as [phase or "phase label", start, end], by its start.
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
            "peak_rss_bytes": peak_rss_bytes(),
            "spans": [[span.name, span.start, span.end] for span in self.labelled_spans],
        }

    def summary(self) -> str:
        """The TIMING SUMMARY table. Phases may overlap, so that they need not add up to the total."""
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
        rows.append(("peak RSS", f"{values['peak_rss_bytes'] / 1e9:9.2f} GB"))
        if values["placement"] is not None:
            rows.append(("placement", f"{values['placement']:>9}"))
        rows.append(("cache", f"{self.cache_hits:9d} hits, {self.cache_misses} misses"))
        width = max(len(label) for label, _ in rows)
        table = [f"  {label:<{width}}  {value}" for label, value in rows]
        return "\n".join(["TIMING SUMMARY", *table])

    def as_trace(self) -> dict[str, Any]:
        """Every span and every step as a trace, and the moments ``ready`` and ``first step``."""
        with self._lock:
            spans, marks = [*self._spans, *self._calls], dict(self._marks)
        moments = {"process_to_ready_seconds": "ready", "process_to_first_step_seconds": "first step"}
        return trace_events(spans, {moments[name]: moment for name, moment in marks.items()})

    def write_json(self, path: Path) -> None:
        """Writes ``as_json`` as indented JSON, atomically.

        Raises:
            UsageError: if the file cannot be written.
        """
        _write(path, json.dumps(self.as_json(), indent=2), "--timing-json")

    def write_trace(self, path: Path) -> None:
        """Writes ``as_trace`` as JSON, atomically; ui.perfetto.dev opens it.

        Raises:
            UsageError: if the file cannot be written.
        """
        _write(path, json.dumps(self.as_trace()), "--timing-trace")


def _write(path: Path, text: str, option: str) -> None:
    try:
        replace_file(path, (text + "\n").encode())
    except OSError as error:
        raise UsageError(
            f"the timing file {path} cannot be written",
            found=error.strerror or error,
            remedy=f"choose another {option}",
        ) from error


class Recorder:
    """Passes what happens in the background on to the timings of everything that is under way.

    What is loaded for one generation may be waited for by another: it is recorded in both. It keeps nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listening: list[Timings] = []

    @contextmanager
    def into(self, timings: Timings) -> Iterator[None]:
        """What ends while the block runs is recorded in these timings too."""
        with self._lock:
            self._listening.append(timings)
        try:
            yield
        finally:
            with self._lock:
                self._listening.remove(timings)

    def _timings(self) -> list[Timings]:
        """Those that listen, each once."""
        with self._lock:
            return list(dict.fromkeys(self._listening))

    @contextmanager
    def phase(self, name: str, label: str | None = None) -> Iterator[None]:
        """Times a block, as ``Timings.phase``."""
        start = now()
        try:
            yield
        finally:
            self.add(name, start, now(), label)

    def add(self, name: str, start: float, end: float, label: str | None = None) -> None:
        """Adds a span to a phase, as ``Timings.add``."""
        for timings in self._timings():
            timings.add(name, start, end, label)

    def count_cache(self, hits: int = 0, misses: int = 0) -> None:
        """Adds executables, as ``Timings.count_cache``."""
        for timings in self._timings():
            timings.count_cache(hits, misses)
