"""What a command is waiting for, and for how long: one line, the same for bytes, steps and everything else.

On a terminal it is one line, rewritten and then erased. Elsewhere it is a line every 10 s, so that quick
phases print nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import TextIO

from wanrun.terminal.live_line import LiveLine, in_notebook
from wanrun.timing.activities import Activities, Activity
from wanrun.units import in_bytes, in_minutes

WORDS: Mapping[str, str] = MappingProxyType(
    {
        "compile": "compiling {}",
        "convert": "converting",
        "decode": "decoding the video",
        "denoise": "denoising",
        "download": "downloading",
        "encode_media": "encoding images and videos",
        "encode_video": "writing the video",
        "executables": "loading {}",
        "import": "importing {}",
        "join": "waiting for the other processes",
        "prepare": "preparing the steps",
        "read_media": "reading images and videos",
        "restore": "reading {}",
        "text": "encoding the prompt",
        "transfer": "bringing {} to the device",
        "trial": "trying executables that were built elsewhere",
        "wait": "waiting for the device",
        "warmup": "warming up",
    }
)
"""What is said of an activity, by its phase, with its label, which may follow; others are not shown."""

OnStep = Callable[[int, int], None]
"""Takes the number of steps that are done, and all of them."""

BLINK_SECONDS, LOG_SECONDS = 0.2, 10.0
"""How often the line is written, over the last one and in a log."""


@dataclass
class Count:
    """How much of a phase's work is done.

    Args:
        total: all units.
        unit: one unit, in the singular; ``B`` is bytes.
        done: units that are done.
    """

    total: int
    unit: str = "step"
    done: int = 0

    @property
    def text(self) -> str:
        """Such as ``12 of 50 steps``, or ``1.24 GB of 2.84 GB``."""
        if self.unit == "B":
            return f"{in_bytes(self.done)} of {in_bytes(self.total)}"
        return f"{self.done} of {self.total} {self.unit}s"


def counted(activity: Activity, counts: Mapping[str, Count]) -> Count | None:
    """Returns how much of an activity is done; None if that is not counted."""
    if activity.progress is not None:
        done, total = activity.progress()
        return Count(total, "B", done)
    return counts.get(activity.phase)


def told(activities: Sequence[Activity], counts: Mapping[str, Count] = MappingProxyType({})) -> str:
    """Returns what is going on in words, such as ``reading vae (0.21 GB of 0.51 GB), loading decode_video``.

    Args:
        activities: what is going on.
        counts: how much is done of the phases that are counted elsewhere.
    """
    parts: dict[str, None] = {}
    for one in activities:
        if one.phase in WORDS:
            word, label = WORDS[one.phase], (one.label or "").replace("_", " ")
            text = word.format(label or "what it needs")
            if label and "{}" not in word:
                text += f" ({label})"
            count = counted(one, counts)
            parts[text if count is None else f"{text} ({count.text})"] = None
    return ", ".join(parts)


class Status:
    """Shows what is going on while a block runs.

    Args:
        running: returns the activities.
        stream: the output, by default stderr.

    Attributes:
        counts: how much is done of phases whose activities do not say it.
        place: what stands in front, such as ``[2/8]``, or nothing.
    """

    def __init__(self, running: Callable[[], Sequence[Activity]], stream: TextIO | None = None) -> None:
        self._running, self._line = running, LiveLine(stream)
        self.counts: dict[str, Count] = {}
        self.place = ""
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._pauses = 0
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="wanrun status", daemon=True)

    def __enter__(self) -> Status:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        with self._lock:
            self._line.clear()
            self._pauses += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Shows nothing while a block runs, which prints. The time begins anew after it."""
        with self._lock:
            self._line.clear()
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                self._since = time.monotonic()

    def around(self, tell: Callable[[str], None]) -> Callable[[str], None]:
        """Returns a function that prints a line with nothing of this one left before it."""

        def alone(line: str) -> None:
            with self.paused():
                tell(line)

        return alone

    @contextmanager
    def counting(self, phase: str, count: Count, place: str = "") -> Iterator[None]:
        """Shows how much of a phase is done while a block runs, and where it stands among others."""
        self.counts[phase], self.place = count, place
        try:
            yield
        finally:
            self.counts.pop(phase, None)
            self.place = ""

    def _run(self) -> None:
        live = self._line.live
        while not (self._line.gone or self._ended.wait(BLINK_SECONDS if live else LOG_SECONDS)):
            with self._lock:
                if not self._pauses:
                    self._show()

    def _show(self) -> None:
        activities = [one for one in self._running() if one.phase in WORDS]
        if not activities:
            self._line.clear()
            return
        now = time.monotonic()
        seconds, bar = now - max(activities[0].begun, self._since), ""
        text = f"{self.place}{told(activities, self.counts)}, {seconds:.0f} s"
        for one in activities:
            count = counted(one, self.counts)
            if count is not None and 0 < count.done < count.total:
                left = (now - one.begun) / count.done * (count.total - count.done)
                bar = f"{self._line.bar(count.done / count.total)} "
                text += f", {in_minutes(left)} left"
                break
        self._line.show(f"{bar}{text}" if self._line.live else f"waiting: {text}")


class Progress:
    """Shows how much of a loop is done while it runs.

    Args:
        total: the number of units.
        phase: the name of the work, one of ``WORDS``.
        unit: the name of one unit, in the singular; ``B`` is bytes.
        stream: the output, by default stderr.
    """

    def __init__(self, total: int, phase: str, unit: str = "B", *, stream: TextIO | None = None) -> None:
        self._count, self._lock = Count(total, unit), threading.Lock()
        activity = Activity(phase, None, time.monotonic())
        self._status = Status(lambda: (activity,), stream)
        self._status.counts[phase] = self._count

    def __enter__(self) -> Progress:
        self._status.__enter__()
        return self

    def advance(self, n: int = 1) -> None:
        """Adds n finished units; thread-safe."""
        with self._lock:
            self._count.done += n

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.__exit__(kind, error, trace)


def shown(progress: bool | None) -> bool:
    """Returns whether a Python program's waits are shown: as it says, else in a notebook."""
    return in_notebook() if progress is None else progress


@contextmanager
def following(on_step: OnStep, activities: Activities | None) -> Iterator[OnStep]:
    """Shows what a generation waits for while a block runs; yields what is called after steps.

    Args:
        on_step: called after steps too.
        activities: what is going on; None: nothing is shown.
    """
    if activities is None:
        yield on_step
        return
    count = Count(0)

    def both(step: int, total: int) -> None:
        count.done, count.total = step, total
        on_step(step, total)

    with Status(lambda: activities.running) as status, status.counting("denoise", count):
        yield both
