"""Timing of a run or a generation: phases on the process's clock, steps, memory, cache counts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wanrun.timing.clock import now
from wanrun.timing.floors import MOVING, Floor, floors, rates, start_floor
from wanrun.timing.spans import Interval, Span, Spans, length
from wanrun.units import in_bytes

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


def peak_rss_bytes() -> int:
    """Returns this process's peak resident memory in bytes; 0 if the system does not report it.

    The maximum of ``getrusage`` starts with that of the parent process.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def disk_bytes() -> int | None:
    """Returns the bytes that storage brought for this process, not the page cache; None if unknown."""
    try:
        fields = Path("/proc/self/io").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system, or one that keeps it from us
        return None
    return next((int(line.split()[1]) for line in fields if line.startswith("read_bytes:")), None)


class Timings(Spans):
    """Collects durations; thread-safe.

    Args:
        begin: when the timed work begins, in seconds since the process started. The total and the unaccounted
            time count from there; all other times are on the process's clock.
        whole: of a run with many generations, of which this is one: it records the same. None for no run.

    Attributes:
        whole: the argument.
        cache_hits: executables loaded from the compilation cache.
        cache_misses: executables that had to be compiled.
        restore_bytes: bytes of weights that were read from storage.
        placement: where the parameters of two experts are: ``both`` on the device, one there and the other in
            ``host`` memory, or ``one`` read at a time; None for a model with one transformer.
        loop: the form of the denoising loop of the latest steps; None before any steps.
        together: whether a call of it makes several steps.
        target: the artifact's target that was loaded; None before that.
        known_rates: bytes a second that earlier runs have reached here, by phase of ``MOVING``.
        step_seconds: the denoising steps so far; the steps of one call have equal times.
        changed: called after a span begins, ends or is added, from any thread; None for nobody.
    """

    def __init__(self, begin: float = 0.0, whole: Timings | None = None) -> None:
        super().__init__()
        self._begin, self.whole = begin, whole
        self._end: float | None = None
        self._marks: dict[str, float] = {}
        self.cache_hits = 0
        self.cache_misses = 0
        self.restore_bytes = 0
        self.placement: str | None = None
        self.loop: str | None = None
        self.together = False
        self.target: str | None = None
        self.known_rates: Mapping[str, float] = {}
        self.step_seconds: list[float] = []
        self.changed: Callable[[], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: who hears of changes, and the run, belong to this process."""
        return {**super().__getstate__(), "changed": None, "whole": None}

    def take(self, span: Span) -> None:
        super().take(span)
        if self.whole is not None:
            self.whole.take(span)
        if self.changed is not None:
            self.changed()

    def end(self, span: Span, at: float | None = None) -> None:
        super().end(span, at)
        if self.changed is not None:
            self.changed()

    def __repr__(self) -> str:
        total = (self.now() if self._end is None else self._end) - self._begin
        return f"<Timings: {total:.1f} s in all, {len(self.step_seconds)} steps>"

    def now(self) -> float:
        """Returns the seconds since the process started."""
        return now()

    @classmethod
    def from_now(cls, whole: Timings | None = None) -> Timings:
        """Returns timings of work that begins now, in a process that may have started long ago."""
        return cls(now(), whole)

    def stop(self) -> None:
        """Ends the total: later time does not count."""
        self._end = self.now()

    def count(self, **more: int) -> None:
        """Adds to ``cache_hits``, ``cache_misses`` or ``restore_bytes``."""
        with self._lock:
            for name, number in more.items():
                setattr(self, name, getattr(self, name) + number)

    def forget(self, spans: list[Span]) -> None:
        """Takes away spans that go on: their end is not recorded here."""
        with self._lock:
            for span in spans:
                self._spans.pop(span, None)

    def steps(self, loop: str, count: int, seconds: float, together: bool = False) -> None:
        """Adds one call of a program of the loop that ends now, synchronised with the device.

        The end of the first call is the end of the first step. Each of the ``count`` steps of the call is
        recorded with their mean; ``together`` says that this form of the loop makes several steps in a call.
        """
        end = self.now()
        with self._lock:
            self.loop, self.together = loop, together
            self.step_seconds += [seconds / count] * count
            self._marks.setdefault("first step", end)
        if self.whole is not None:
            self.whole.steps(loop, count, seconds, together)

    def mark_ready(self) -> None:
        """Marks the moment when the first step can be dispatched; later calls change nothing."""
        self._marks.setdefault("ready", self.now())
        if self.whole is not None:
            self.whole.mark_ready()

    @property
    def labelled_spans(self) -> list[Span]:
        """Every span that has ended, ordered by start."""
        with self._lock:
            ended = [span for span in self._spans if span.ended]
        return sorted(ended, key=lambda span: (span.start, span.end))

    @property
    def spans(self) -> Mapping[str, list[Interval]]:
        """(start, end) of every span that has ended by phase, in seconds since the process started."""
        spans: dict[str, list[Interval]] = {}
        for span in self.labelled_spans:
            spans.setdefault(span.phase, []).append((span.start, span.end))
        return spans

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall time of each recorded phase; overlapping spans count once."""
        return {name: length(spans) for name, spans in self.spans.items()}

    @property
    def rates(self) -> Mapping[str, float]:
        """The highest bytes a second so far by phase, of stages that moved enough to tell."""
        return rates(self.labelled_spans)

    @property
    def floors(self) -> Mapping[str, Floor]:
        """The least seconds of phases: their bytes over the highest rate of this run or of earlier ones."""
        return floors(self.labelled_spans, self.known_rates)

    @property
    def start_floor_seconds(self) -> float | None:
        """The least time until the first step can be dispatched, as of ``start_floor``; None before that."""
        if (ready := self._marks.get("ready")) is None:
            return None
        return start_floor(self.labelled_spans, self.known_rates, ready)

    @property
    def unaccounted_seconds(self) -> float | None:
        """Time until the end of the first step that no span covers; None before that moment."""
        if (until := self._marks.get("first step")) is None:
            return None
        spans = [(span.start, span.end) for span in self.labelled_spans]
        return until - self._begin - length(spans, self._begin, until)

    @property
    def loop_overhead_seconds(self) -> float | None:
        """The Python loop's mean time per denoising step, besides the synchronised execution.

        In the scan form it is the time per call, spread over its steps. None without steps, or if some of
        them ran outside the phase ``denoise``.
        """
        steps, denoise = self.step_seconds, self.seconds.get("denoise", 0.0)
        return (denoise - sum(steps)) / len(steps) if steps and denoise >= sum(steps) else None

    def as_json(self) -> dict[str, Any]:
        """Returns a flat object with stable keys: a phase without spans is 0, a moment not reached is None.

        If ``loop`` is ``scan``, ``process_to_first_step_seconds`` is the end of the first call, and each
        entry of ``step_seconds`` is the mean of its call. ``placement`` is the attribute. ``spans`` lists
        every span as [phase or "phase label", start, end], ordered by start. A floor is the least time, and
        None where no rate was seen.
        """
        seconds, least = self.seconds, self.floors
        names = [*PHASES, *sorted(seconds.keys() - set(PHASES))]
        return {
            **{f"{name}_seconds": seconds.get(name, 0.0) for name in names},
            "process_to_ready_seconds": self._marks.get("ready"),
            **{f"{name}_floor_seconds": least[name].seconds if name in least else None for name in MOVING},
            "process_to_ready_floor_seconds": self.start_floor_seconds,
            "process_to_first_step_seconds": self._marks.get("first step"),
            "unaccounted_seconds": self.unaccounted_seconds,
            "loop": self.loop,
            "placement": self.placement,
            "step_seconds": list(self.step_seconds),
            "loop_overhead_seconds": self.loop_overhead_seconds,
            "total_seconds": (self.now() if self._end is None else self._end) - self._begin,
            "cache_hits": self.cache_hits,
            "cache_misses": self.cache_misses,
            "restore_bytes": self.restore_bytes,
            "peak_rss_bytes": peak_rss_bytes(),
            "disk_bytes": disk_bytes(),
            "spans": [[span.name, span.start, span.end] for span in self.labelled_spans],
        }

    def summary(self) -> str:
        """Returns the TIMING SUMMARY table. Phases may overlap, so they need not add up to the total."""
        values = self.as_json()
        rows: list[tuple[str, str]] = []
        for key in values:
            name = key.removesuffix("_seconds")
            if name in self.seconds or name in PHASES:
                told = f"  {self.floors[name]}" if name in self.floors else ""
                rows.append((_LABELS.get(name, name.replace("_", " ")), f"{values[key]:9.2f} s{told}"))
            if name == "denoise" and values["step_seconds"]:
                steps = values["step_seconds"]
                if self.together:
                    rows.append(("  mean step", f"{statistics.fmean(steps):9.2f} s  of {len(steps)}"))
                else:
                    rows.append(("  first step", f"{steps[0]:9.2f} s"))
                    rows.append(("  median step", f"{statistics.median(steps):9.2f} s  of {len(steps)}"))
                    if (overhead := values["loop_overhead_seconds"]) is not None:
                        rows.append(("  between steps", f"{overhead * 1e3:9.2f} ms each"))
        for name in ("process_to_ready", "process_to_first_step", "unaccounted"):
            if values[f"{name}_seconds"] is not None:
                least = values.get(f"{name}_floor_seconds")
                told = "" if least is None else f"  at least {least:.2f} s"
                rows.append((name.replace("_", " "), f"{values[f'{name}_seconds']:9.2f} s{told}"))
        rows.append(("total", f"{values['total_seconds']:9.2f} s"))
        rows.append(("peak RSS", f"{in_bytes(values['peak_rss_bytes']):>12}"))
        if values["disk_bytes"] is not None:
            rows.append(("read from disk", f"{in_bytes(values['disk_bytes']):>12}"))
        if values["placement"] is not None:
            rows.append(("placement", f"{values['placement']:>9}"))
        rows.append(("cache", f"{self.cache_hits:9d} hits, {self.cache_misses} misses"))
        width = max(len(label) for label, _ in rows)
        table = [f"  {label:<{width}}  {value}" for label, value in rows]
        return "\n".join(["TIMING SUMMARY", *table])


class Recorder(Spans):
    """Spans of work in the background, which belong to whoever waits for it. It keeps only those that go on.

    Several generations may wait for the same load: it is recorded in each of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._listening: list[Timings] = []

    @contextmanager
    def into(self, timings: Timings) -> Iterator[None]:
        """Records spans that end while the block runs in these timings too; they show those that go on."""
        with self._lock:
            news = timings not in self._listening
            self._listening.append(timings)
            for span in self._spans if news else ():
                timings.take(span)
        try:
            yield
        finally:
            with self._lock:
                self._listening.remove(timings)
                if timings not in self._listening:
                    timings.forget(list(self._spans))

    def take(self, span: Span) -> None:
        with self._lock:
            if not span.ended:
                self._spans[span] = None
            for timings in self._listeners():
                timings.take(span)

    def end(self, span: Span, at: float | None = None) -> None:
        with self._lock:
            super().end(span, at)
            del self._spans[span]

    def count(self, **more: int) -> None:
        """Adds numbers, like ``Timings.count``; to a run of several generations that listen, once."""
        with self._lock:
            listeners = self._listeners()
            wholes = [one.whole for one in listeners if one.whole is not None]
            for timings in dict.fromkeys([*listeners, *wholes]):
                timings.count(**more)

    def _listeners(self) -> list[Timings]:
        """The listening timings, each once."""
        return list(dict.fromkeys(self._listening))
