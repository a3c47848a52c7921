"""The videos that a worker has: one whose steps are made, and one that is decoded and written meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from wanrun import Event
from wanrun.job.line import AT_ONCE
from wanserve.video import Video


@dataclass
class _One:
    """A video, whether its worker has said anything of it, and whether all of its steps are made.

    ``shared`` are the seconds from its begin to the end of the one before; None if it was begun alone.
    """

    video: Video
    told: bool = False
    passed: bool = False
    shared: float | None = None


class Held:
    """The videos that a worker has.

    ``empty`` is set while there is none. ``leaving`` says that the worker ends after these. ``most`` is the
    number of videos at once; 1 once two have taken too much memory. ``lacks`` says whether a video's profile
    was built after the worker's start, or is not built; ``waits`` whether a video waits for a build that
    another worker has left its device for.
    """

    def __init__(self) -> None:
        self._ones: dict[str, _One] = {}
        self.empty, self.leaving, self.most = asyncio.Event(), False, AT_ONCE
        self.empty.set()
        self.lacks: Callable[[Video], bool] = lambda video: False
        self.waits: Callable[[Video], bool] = lambda video: False

    @property
    def videos(self) -> list[Video]:
        """The videos, the one that was begun first before the other."""
        return [one.video for one in self._ones.values()]

    @property
    def alone(self) -> bool:
        """Whether a video's end is its own fault: no other one is there, and none has taken the memory."""
        return len(self._ones) < 2 and not self.leaving

    def fits(self, video: Video) -> bool:
        """Whether a waiting video may be begun now.

        Beside another one it may once that has made its steps, with the same model, and if no worker has
        ended with either: a worker loads nothing while it computes, and what is tried again is tried alone.
        So is what the worker lacks: another one is started for it.
        """
        if self.leaving or not self._ones:
            return not self.leaving
        others = self._ones.values()
        first = video.attempts == 0 and all(one.video.attempts == 1 for one in others)
        ready = all(one.passed and one.video.model == video.model for one in others)
        return first and ready and len(others) < self.most and not self.lacks(video)

    def add(self, video: Video) -> None:
        """Takes a video that is given to the worker."""
        self._ones[video.id] = _One(video)
        self.empty.clear()

    def take(self, event: Event) -> bool:
        """Records what the worker does; returns whether another video may be begun for it."""
        if (one := self._ones.get(event.id)) is None:
            return False
        before, one.told = one.passed, True
        one.passed = before or event.step == event.steps
        return one.passed and not before

    def told(self, video: Video) -> bool:
        """Whether the worker has said anything of a video that it has."""
        return (one := self._ones.get(video.id)) is not None and one.told

    def shared(self, video: Video) -> float | None:
        """Returns the seconds between a video's begin and the end of the one before; None if it was alone."""
        return None if (one := self._ones.get(video.id)) is None else one.shared

    def drop(self, video: Video) -> None:
        """Forgets a video, which has ended."""
        was_first, now = next(iter(self._ones), None) == video.id, time.time()
        self._ones.pop(video.id, None)
        for one in self._ones.values() if was_first else ():
            one.shared = max(now - (one.video.started or now), 0.0)
        if not self._ones:
            self.empty.set()
