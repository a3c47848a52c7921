"""Previews of a video that is being made, on request, paced so that no step is slower for them."""

from __future__ import annotations

__all__ = ["Previews"]

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from wanrun.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from wanrun.generation.step import Step

PAUSE_SECONDS: Final = 2.0
"""The shortest time between two previews: one of 21 latent frames is seen once."""

PARTS: Final = 120
"""Of the time between two previews one part may go into the first of them: steps lose less than 1 %."""


MARGIN: Final = 4
"""How many times longer a decoder may take for the compiler's count of its work than a step does."""

RARE_SECONDS: Final = 60.0
"""The longest time between two decoded previews, unless two steps take longer: else they are not decoded."""


class Previews:
    """Makes previews of one job between its steps, if one was asked for since the last one.

    They are a linear map of the latents; those of a video of the tiny decoder are decoded by it, once that
    takes a small share of the time of the steps too.

    Args:
        show: gets the number of steps done, and a preview: uint8 (T, h, w, 3).
        clock: returns seconds.
    """

    def __init__(
        self, show: Callable[[int, np.ndarray], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._show, self._clock = show, clock
        self._wanted, self._next = False, float("-inf")
        self._first: tuple[float, int] | None = None  # when the first step was done, and its number

    def look(self) -> None:
        """Asks for a preview of the next step that can have one; from any thread."""
        self._wanted = True

    def step(self, done: int, step: Step) -> None:
        """Shows a preview of a step if one is wanted, and the one before is long enough ago."""
        began = self._clock()
        self._first = self._first or (began, done)
        if not self._wanted or began < self._next:
            return
        self._wanted = False
        try:
            frames = step.decoded() if self._decodes(began, done, step) else step.preview()
        except UsageError:  # the artifact has no map
            self._next = float("inf")
            return
        self._show(done, frames)
        ended = self._clock()
        self._next = ended + max(PAUSE_SECONDS, PARTS * (ended - began))

    def _decodes(self, now: float, done: int, step: Step) -> bool:
        """Returns whether the device has time for a decoded preview, and will have it again soon."""
        since, first = self._first or (now, done)
        if step.tiny is None or done <= first:
            return False
        each = (now - since) / (done - first)
        pause = PARTS * MARGIN * step.tiny.steps * each
        return pause <= min(now - since, max(RARE_SECONDS, 2 * each))
