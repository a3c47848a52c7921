"""Whose turn it is: which of the waiting videos runs next, and which worker gets it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection
from typing import Final

from wanserve.held import Held
from wanserve.progress import VideoProgress
from wanserve.room import Room, frames_bytes
from wanserve.video import Video

ROOM_SECONDS: Final = 2.0
"""After which a video that waits for room on the disk looks again."""


class Dispatcher:
    """A dispatcher that gives waiting videos to workers, one after the other, until ``closing``.

    ``waiting`` has the next video first; ``running`` are those that workers have, by id; ``withheld`` the
    models whose videos wait for the next start. ``room`` is what the disk has.
    """

    def __init__(
        self,
        waiting: list[Video],
        running: dict[str, VideoProgress],
        withheld: Collection[str],
        room: Room,
    ) -> None:
        self._waiting, self._running, self._withheld, self._room = waiting, running, withheld, room
        self._wake, self._askers = asyncio.Event(), list[Held]()
        self.closing = False

    async def next(self, held: Held) -> Video:
        """Waits for the first video that a worker may begin, and returns it; it runs from now on.

        ``held`` is what the worker has, and has the video too from now on. Workers that have none come first.
        """
        self._askers.append(held)
        try:
            while (video := self._fitting(held)) is None:
                self._wake.clear()
                looks_again = ROOM_SECONDS if self._waiting and not self.closing else None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(looks_again):
                        await self._wake.wait()
        finally:
            self._askers.remove(held)
        self._waiting.remove(video)
        video.status, video.started, video.attempts = "in_progress", time.time(), video.attempts + 1
        follows = next((one.id for one in held.videos), None)
        self._running[video.id] = VideoProgress(video, steps=video.shape["num_steps"], follows=follows)
        held.add(video)
        self.look_again()  # who gave way to this worker may have the next one
        return video

    def look_again(self) -> None:
        """Has the callers that wait in ``next`` look again: there is another video, or a worker has fewer."""
        self._wake.set()

    def _fitting(self, held: Held) -> Video | None:
        """The first waiting video whose frames have room with the running ones, if it may begin."""
        if self.closing or not self._waiting or self._room.lack_logged():
            return None
        if held.videos and not all(one.videos or one.leaving for one in self._askers):
            return None
        left = self._room.left() - sum(frames_bytes(one.video) for one in self._running.values())
        may_run = (one for one in self._waiting if one.model not in self._withheld and not held.waits(one))
        video = next((video for video in may_run if frames_bytes(video) <= left), None)
        return video if video is not None and held.fits(video) else None
