"""Small moving pictures of a video that is being made, for those who look at it."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from wanrun.errors import UsageError
from wanserve.messages import Preview

if TYPE_CHECKING:
    import numpy as np

    from wanrun import Step

PAUSE_SECONDS: Final = 2.0
"""The shortest time between two previews: one of 21 latent frames is seen once."""

PARTS: Final = 120
"""Of the time between two previews one part may go into the first of them: steps lose less than 1 %."""

FRAME_MS: Final = 100
"""How long each latent frame is shown."""


class Previews:
    """Makes previews of one job between its steps, if somebody has looked since the last one.

    Args:
        id: the job.
        send: sends a preview to the server.
        clock: returns seconds.
    """

    def __init__(
        self, id: str, send: Callable[[Preview], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._id, self._send, self._clock = id, send, clock
        self._wanted, self._next = False, float("-inf")

    def look(self) -> None:
        """Asks for a preview of the next step that can have one; from any thread."""
        self._wanted = True

    def step(self, done: int, step: Step) -> None:
        """Sends a preview of a step if one is wanted, and the one before is long enough ago."""
        began = self._clock()
        if not self._wanted or began < self._next:
            return
        self._wanted = False
        try:
            frames = step.preview()
        except UsageError:  # the artifact has no map
            self._next = float("inf")
            return
        self._send(Preview(self._id, done, moving(frames)))
        ended = self._clock()
        self._next = ended + max(PAUSE_SECONDS, PARTS * (ended - began))


def moving(frames: np.ndarray) -> bytes:
    """Returns frames, uint8 (T, h, w, 3), as a WebP that repeats."""
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
