"""A token by which any thread ends a generation of another one."""

from __future__ import annotations

import threading

from wanrun.errors import CancelledError

ASK_SECONDS = 0.1
"""How often a generation that waits for the device looks at its token."""


class CancelToken:
    """Ends the generations that it is given to, at their next look at it.

    They look when they begin, while they wait for the device, after each call of the denoising loop, and
    before decoding. The device is free then. What is being loaded goes on to load, for later generations.
    """

    def __init__(self) -> None:
        self._event = threading.Event()

    def __repr__(self) -> str:
        return f"<CancelToken: {'cancelled' if self.cancelled else 'not cancelled'}>"

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called."""
        return self._event.is_set()

    def cancel(self) -> None:
        """Ends the generations, with a CancelledError in their own threads; from any thread, at any time."""
        self._event.set()

    def check(self) -> None:
        """Raises CancelledError once ``cancel`` was called."""
        if self.cancelled:
            raise CancelledError("the generation was cancelled")
