"""A video that a worker has: what it does, and since when."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from wanserve.messages import Now
from wanserve.video import Live, Video


@dataclass
class Running:
    """A video that a worker has.

    Attributes:
        video: the video.
        live: what is known of it.
        cancel: tells the worker to end it.
        removed: whether it is forgotten once it ends.
    """

    video: Video
    live: Live
    cancel: Callable[[], None] = lambda: None
    removed: bool = False
    _phase_began: float = field(default_factory=time.monotonic)
    _steps_began: float | None = None

    def now(self, message: Now) -> None:
        """Takes what the worker does."""
        if message.phase != self.live.phase:
            self._phase_began = time.monotonic()
            if message.phase == "steps" and self._steps_began is None:
                self._steps_began = self._phase_began
        if message.step != self.live.step:
            self._phase_began = time.monotonic()
        if self.live.phase != "cancelling":
            self.live.phase = message.phase
        self.live.step, self.live.steps = message.step, message.steps or self.live.steps

    @property
    def clock(self) -> dict[str, float | None]:
        """Seconds of the phase, or since the last step, and the mean of the steps so far."""
        now, began = time.monotonic(), self._steps_began
        step = None
        if began is not None and self.live.step:
            step = (self._phase_began - began) / self.live.step if self.live.phase == "steps" else None
        return {"phase": now - self._phase_began, "step": step or None}
