"""What is going on at this moment, in any thread, for whoever waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Activity(NamedTuple):
    """Work that has begun and has not ended.

    Attributes:
        phase: the kind of work, as of a span.
        label: the object of the work, or None.
        begun: when it began, ``time.monotonic``.
        progress: returns bytes that are done, and all of them; None where they are not counted.
    """

    phase: str
    label: str | None
    begun: float
    progress: Callable[[], tuple[int, int]] | None = None


class Activities:
    """The work that is going on; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[object, Activity] = {}
        self._others: list[Activities] = []

    def begin(
        self, phase: str, label: str | None = None, progress: Callable[[], tuple[int, int]] | None = None
    ) -> object:
        """Adds an activity; returns what ``end`` takes."""
        token = object()
        with self._lock:
            self._running[token] = Activity(phase, label, time.monotonic(), progress)
        return token

    def end(self, token: object) -> None:
        """Removes an activity; does nothing if it is gone."""
        with self._lock:
            self._running.pop(token, None)

    @contextmanager
    def during(self, phase: str, label: str | None = None) -> Iterator[None]:
        """Adds an activity for as long as a block runs."""
        token = self.begin(phase, label)
        try:
            yield
        finally:
            self.end(token)

    @contextmanager
    def beside(self, others: Activities) -> Iterator[None]:
        """Adds what others are doing for as long as a block runs."""
        with self._lock:
            self._others.append(others)
        try:
            yield
        finally:
            with self._lock:
                self._others.remove(others)

    @property
    def running(self) -> list[Activity]:
        """All activities, those that began first in front."""
        with self._lock:
            found, others = list(self._running.values()), list(dict.fromkeys(self._others))
        for other in others:
            found += other.running
        return sorted(found, key=lambda activity: activity.begun)
