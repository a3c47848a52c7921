"""Helpers for lists of futures: a call when all have succeeded, and the pending ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any


def when_done(futures: Sequence[Future[Any]], done: Callable[[], None]) -> None:
    """Calls ``done`` once all futures have succeeded; never if one fails."""
    lock, left = threading.Lock(), len(futures)

    def count(future: Future[Any]) -> None:
        nonlocal left
        if future.cancelled() or future.exception() is not None:
            return
        with lock:
            left -= 1
            last = left == 0
        if last:
            done()

    for future in futures:
        future.add_done_callback(count)


def unfinished(futures: Iterable[Future[Any]]) -> list[Future[Any]]:
    """Returns the pending futures; raises the first failure among the others."""
    pending = []
    for future in futures:
        if future.done():
            future.result()
        else:
            pending.append(future)
    return pending
