"""A token by which any thread ends a generation, or a ``load``, of another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

from wanrun.errors import CancelledError

_Value = TypeVar("_Value")

ASK_SECONDS = 0.1
"""How often a call that waits looks at its token."""


class CancelToken:
    """Ends the calls of ``generate`` and ``load`` that it is given to, at their next look at it.

    They look when they begin, while they read images and videos or wait for the device or for what is being
    loaded, after each call of the denoising loop, and before decoding. The device is free then. What a
    generation has waited for goes on to load, for later generations; a ``load`` that is ended closes what it
    has opened.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._ends: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return f"<CancelToken: {'cancelled' if self.cancelled else 'not cancelled'}>"

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called."""
        return self._event.is_set()

    def cancel(self) -> None:
        """Ends the calls, with a CancelledError in their own threads; from any thread, at any time."""
        self._event.set()
        for end in tuple(self._ends):
            end()

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """Lets ``cancel`` call a function too, such as one that ends a process, while the block runs."""
        self._ends.append(end)
        try:
            if self.cancelled:  # meanwhile: one of both has seen the other
                end()
            yield
        finally:
            self._ends.remove(end)

    def check(self) -> None:
        """Raises CancelledError once ``cancel`` was called."""
        if self.cancelled:
            raise CancelledError("cancelled", "the call was cancelled")


class Waits(threading.local):
    """Waits for what is being loaded: until it is there, or the waiting thread's call is cancelled."""

    token: CancelToken | None = None

    @contextmanager
    def until(self, token: CancelToken | None) -> Iterator[None]:
        """Lets a token end this thread's waiting while the block runs; None for no token."""
        before, self.token = self.token, token
        try:
            yield
        finally:
            self.token = before

    def result(self, future: Future[_Value]) -> _Value:
        """Returns the result of a future. Raises CancelledError once this thread's token is cancelled."""
        while self.token is not None and not wait([future], ASK_SECONDS).done:
            self.token.check()
        return future.result()
