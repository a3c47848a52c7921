"""The progress of a video that waits or is made, by its worker's messages; and its moving preview."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from wanrun import Event
from wanserve.video import Video

if TYPE_CHECKING:
    import numpy as np

QUEUED = "queued"
BUILD = "build"
CANCELLING = "cancelling"
STEPS = "steps"

FRAME_MS: Final = 100
"""How long a preview shows each latent frame."""


@dataclass
class VideoProgress:
    """How far a video is that waits or is made.

    Attributes:
        phase: ``queued``; then what its worker does, and ``cancelling`` once that was asked for.
        position: 1 for the video that is begun next; None for one that a worker has.
        steps: denoising steps, of all windows; None as long as that is not known.
        percent: of the time that it takes; it never falls.
        remaining: seconds until its end; None if nothing was measured yet.
        look: asks the worker for a preview.
        preview: the steps that were done at the newest preview, and its WebP; None before the first.
        removed: whether it is forgotten once it ends.
        follows: the video that its worker had when it was begun, which ends before it; None if it had none.
    """

    video: Video
    phase: str = "loading"
    position: int | None = None
    step: int = 0
    steps: int | None = None
    percent: int = 0
    remaining: float | None = None
    cancel: Callable[[], None] = lambda: None
    look: Callable[[], None] = lambda: None
    preview: tuple[int, bytes] | None = None
    removed: bool = False
    follows: str | None = None
    _phase_began: float = field(default_factory=time.monotonic)
    _steps_began: float | None = None

    def take(self, event: Event) -> None:
        """Records what the worker does."""
        if event.phase != self.phase:
            self._phase_began = time.monotonic()
            if event.phase == STEPS and self._steps_began is None:
                self._steps_began = self._phase_began
        if event.step != self.step:
            self._phase_began = time.monotonic()
        if self.phase != CANCELLING:
            self.phase = event.phase
        self.step, self.steps = event.step, event.steps or self.steps

    @property
    def clock(self) -> dict[str, float | None]:
        """Seconds of the phase, or since the last step, and the mean of the steps so far."""
        now, began = time.monotonic(), self._steps_began
        step = None
        if began is not None and self.step:
            step = (self._phase_began - began) / self.step if self.phase == STEPS else None
        return {"phase": now - self._phase_began, "step": step or None}


def moving(frames: np.ndarray) -> bytes:
    """Returns frames, uint8 (T, h, w, 3), as a WebP that repeats: the preview of a video."""
    from PIL import Image

    file, (first, *others) = io.BytesIO(), [Image.fromarray(frame) for frame in frames]
    first.save(
        file,
        "WEBP",
        save_all=True,
        append_images=others,
        duration=FRAME_MS,
        loop=0,
        quality=60,
        method=0,
    )
    return file.getvalue()
