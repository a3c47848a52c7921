"""The progress of a job: what is done for it now, as events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct

from wanrun.errors import WanError
from wanrun.job.outcome import Outcome
from wanrun.timing.spans import length
from wanrun.timing.timings import Timings

LOADING: Final = "loading"
LIVE: Final = "live"

_PHASES: Final = (
    ("live", LIVE),
    ("encode_video", "encode"),
    ("decode", "decode"),
    ("denoise", "steps"),
    ("prepare", "steps"),
    ("remember", "steps"),
    ("encode_media", "media"),
    ("read_media", "media"),
    ("text", "text"),
)
"""Spans and the phase of a job that they are, the last one first: loading goes on meanwhile."""


class Event(Struct, frozen=True, tag=True):
    """The work that is done for a job now.

    Attributes:
        id: the job.
        phase: ``loading``, ``media``, ``text``, ``steps``, ``decode`` or ``encode``; ``live`` for all that is
            done for a video that goes on.
        step: denoising steps that are done.
        steps: all denoising steps; None before the first one.
    """

    id: str
    phase: str
    step: int = 0
    steps: int | None = None


class Progress:
    """Follows one job by its spans and steps, from the moment when it is made.

    Args:
        id: the job.
        listener: gets each change, from any thread; None for nobody.
        timings: where the times are recorded; of several jobs, perhaps. None for new ones.

    Attributes:
        timings: the times.
    """

    def __init__(
        self,
        id: str,
        listener: Callable[[Event], object] | None = None,
        timings: Timings | None = None,
    ) -> None:
        self.timings = timings if timings is not None else Timings.from_now()
        self._listener, self._last = listener, Event(id, "")
        self._step, self._steps = 0, None  # type: int, int | None
        self._began, self._steps_before = self.timings.now(), len(self.timings.step_seconds)
        self._parts, self._steps_of_parts = dict[str, float](), 0
        if listener is not None:
            self.timings.changed = self._look

    def step(self, done: int, total: int) -> None:
        """Records a step; it is an ``on_step`` of ``Pipeline.run``."""
        self._step, self._steps = done, total
        self._look()

    def _look(self) -> None:
        """Calls the listener if something has changed."""
        if self._listener is None:  # a run of many jobs has many spans to look at
            return
        running = {span.phase for span in self.timings.running}
        phase = next((name for span, name in _PHASES if span in running), None)
        if phase is None:  # between two phases nothing runs
            phase = LOADING if running else self._last.phase or LOADING
        if (now := Event(self._last.id, phase, self._step, self._steps)) != self._last:
            self._last = now
            self._listener(now)

    def part(self, timings: Timings) -> None:
        """Adds what a part of the job with separate timings took: a chunk of a video that goes on."""
        _add(self._parts, timings)
        self._steps_of_parts += len(timings.step_seconds)

    def stop(self) -> None:
        """Calls the listener no more."""
        self.timings.changed = None

    def outcome(self, error: WanError | None = None, **made: Any) -> Outcome:
        """Returns how the job has ended now.

        Args:
            error: why there are no videos; None if there are.
            made: ``metadata``, ``sizes`` and ``warnings`` of the videos, as of ``Outcome``.
        """
        return Outcome(
            id=self._last.id,
            seconds=self.seconds,
            elapsed=self.timings.now() - self._began,
            steps=self.steps,
            error=error,
            **made,
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that each phase has taken of this job, without loading and ``live``, which may wait."""
        return _add(dict(self._parts), self.timings, self._began)

    @property
    def steps(self) -> int:
        """Denoising steps of this job, of all windows."""
        return len(self.timings.step_seconds) - self._steps_before + self._steps_of_parts


def _add(sums: dict[str, float], timings: Timings, began: float = 0.0) -> dict[str, float]:
    """Adds the seconds of each phase of a job since a moment, and returns the sums."""
    spans = timings.spans
    for span, name in reversed(_PHASES):
        own = [one for one in spans.get(span, ()) if one[1] >= began]
        if own and name != LIVE:
            sums[name] = sums.get(name, 0.0) + length(own, began)
    return sums
