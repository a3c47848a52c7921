"""Previews of a video that is being made, while somebody looks, paced so that no step is slower for them."""

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


class Previews:
    """Makes previews of one job between its steps, if somebody has looked since the last one.

    Args:
        show: gets the number of steps done, and a preview: uint8 (T, h, w, 3).
        clock: returns seconds.
    """

    def __init__(
        self, show: Callable[[int, np.ndarray], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._show, self._clock = show, clock
        self._wanted, self._next = False, float("-inf")

    def look(self) -> None:
        """Asks for a preview of the next step that can have one; from any thread."""
        self._wanted = True

    def step(self, done: int, step: Step) -> None:
        """Shows a preview of a step if one is wanted, and the one before is long enough ago."""
        began = self._clock()
        if not self._wanted or began < self._next:
            return
        self._wanted = False
        try:
            frames = step.preview()
        except UsageError:  # the artifact has no map
            self._next = float("inf")
            return
        self._show(done, frames)
        ended = self._clock()
        self._next = ended + max(PAUSE_SECONDS, PARTS * (ended - began))
