"""The videos of a server: takes, orders, changes, cancels and forgets them, and hands them to workers.

What is stored is the truth at a start. While the server runs, the videos that wait or run are in memory too.
A change of theirs is made there first, in one step of the event loop, and then stored.
"""

from __future__ import annotations

import asyncio
import bisect
import sqlite3
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wanrun.errors import CancelledError
from wanserve import database as stored
from wanserve.board import Board
from wanserve.database import VideoDatabase
from wanserve.dispatcher import Dispatcher
from wanserve.folders import Folders
from wanserve.live_jobs import LiveJobs
from wanserve.log import INFO, WARNING, tell
from wanserve.messages import Fragment, code_of
from wanserve.metrics import Metrics
from wanserve.process import from_outside
from wanserve.progress import CANCELLING, VideoProgress
from wanserve.publisher import Publisher
from wanserve.refusal import RefusedError, closing, full
from wanserve.resolved import Resolved
from wanserve.retention import restored
from wanserve.room import Room
from wanserve.settings import Settings
from wanserve.video import Failure, Stopped, Video

if TYPE_CHECKING:
    from wanrun import Event, Outcome


class Queue:
    """The videos that wait, and those that workers have.

    ``resolved`` has the generations of the videos, ``withheld`` by model why its videos wait for the next
    start. ``turns`` gives the next video to a worker; ``lives`` are the live ones that have not ended.
    """

    def __init__(
        self, settings: Settings, folders: Folders, store: VideoDatabase, hub: Publisher, metrics: Metrics
    ) -> None:
        self._settings, self._folders, self._store = settings, folders, store
        self.hub, self._metrics = hub, metrics
        self.room = Room(settings.data, settings.keep_seconds is not None or settings.keep_bytes is not None)
        self._waiting, self._running = list[Video](), dict[str, VideoProgress]()
        self.resolved, self.withheld = Resolved(), dict[str, str]()
        videos = self._waiting, self._running, self.withheld
        self.board = Board(settings, folders, hub, *videos, store.times())
        self._unstored, self._unremoved = dict[str, Video](), set[str]()
        self.turns = Dispatcher(self._waiting, self._running, self.withheld, self.room)
        self._broken, self.loads = 0, False
        self.lives = LiveJobs(settings, folders, metrics, self.stop)

    async def restore(self) -> None:
        """Takes what the last server has left."""
        self._waiting[:] = await restored(self._store, self._folders)
        self.turns.look_again()

    # What clients ask for.

    async def accept(
        self, *given: tuple[Video, Callable[[], None]], owner_limit: int | None = None
    ) -> list[Video]:
        """Stores new videos of one owner at the end of the queue, all or none.

        Each comes with a function that puts its files in place, which is not called for a video whose
        idempotency key another one has. Returns each video, or that other one. Raises RefusedError if the
        queue has no room for them, if more than ``owner_limit`` videos of their owner would wait, or if a key
        is that of another request.
        """
        retry = str(self.board.retry_seconds())
        if self.turns.closing:
            raise closing()

        def put(connection: sqlite3.Connection) -> list[Video]:
            kept = [self._earlier(connection, video) or video for video, _ in given]
            new = [one for one, found in zip(given, kept, strict=True) if one[0] is found]
            limits = ((None, self._settings.max_waiting), (kept[0].owner, owner_limit))
            for owner, limit in limits if new else ():
                if limit is not None and stored.count(connection, "queued", owner) + len(new) > limit:
                    raise full(len(new), limit, owner, retry)
            for video, keep in new:
                video.rank = stored.last_rank(connection) + 1.0
                keep()
                stored.add(connection, video)
            return kept

        try:
            kept = await self._store.change(put)
        except Exception:
            for video, _ in given:
                self.resolved.drop(video.id)
                await asyncio.to_thread(self._folders.remove, video.id)  # of a commit that has failed
            raise
        for video, found in zip((one for one, _ in given), kept, strict=True):
            if video is found:
                bisect.insort(self._waiting, video, key=lambda one: one.rank)
                self.board.publish(video)
        self.turns.look_again()
        return [self._here(one.id) or one for one in kept]

    def _earlier(self, connection: sqlite3.Connection, video: Video) -> Video | None:
        """Returns the video that an idempotency key has; raises RefusedError for another request's."""
        if video.idempotency is None:
            return None
        other = stored.with_key(connection, video.owner, video.idempotency)
        if other is not None and other.id in self._unremoved:
            stored.remove(connection, other.id)
            return None
        if other is not None and other.fingerprint != video.fingerprint:
            what = "the Idempotency-Key was used for another request"
            raise RefusedError(what, 409, code="idempotency_conflict", remedy="choose a new one")
        return other

    def find(self, id: str, owner: str | None) -> Video:
        """Returns a video of an owner, None for everybody. Raises RefusedError if there is none."""
        video = self._here(id) or self._store.find(id)
        if id in self._unremoved or ((running := self._running.get(id)) is not None and running.removed):
            video = None
        if video is None or owner not in (None, video.owner):
            raise RefusedError(f"there is no video {id[:60]!r}", 404, code="not_found", param="id")
        return video

    def _here(self, id: str) -> Video | None:
        """Returns a video that is in memory: it waits, runs, or has ended and is not stored yet."""
        if (running := self._running.get(id)) is not None:
            return running.video
        return self._unstored.get(id) or next((one for one in self._waiting if one.id == id), None)

    def current(self, videos: list[Video]) -> list[Video]:
        """Returns stored videos as they are in memory, without those that are forgotten."""
        here = {video.id: video for video in self._waiting} | self._unstored
        here |= {id: running.video for id, running in self._running.items()}
        return [here.get(video.id, video) for video in videos if video.id not in self._unremoved]

    async def cancel(self, video: Video) -> None:
        """Cancels a video: one that waits at once, one that runs as soon as its worker looks.

        Raises RefusedError if it has ended already.
        """
        if video.over:
            raise RefusedError(f"the video is {video.status} already", 409, code="already_ended")
        if (running := self._running.get(video.id)) is not None:
            video.stopped_by("client")
            video.unwanted, running.phase = True, CANCELLING
            running.cancel()
            self.board.publish(video)
            await self._put(video)
            return
        self.check_waiting(video)
        self._waiting.remove(video)
        await self._end(video, "cancelled")

    async def stop(self, video: Video, why: Stopped) -> None:
        """Ends a live video that runs, not by its client's word."""
        if not video.over:
            video.stopped_by(why)
            await self.cancel(video)

    async def delete(self, video: Video) -> None:
        """Forgets a video and its files; one that runs is cancelled, and its files go when it has ended.

        The files of others go first: on a full disk that makes the room to store that they are gone. If that
        cannot be stored yet, the video is forgotten all the same, and it is stored later.
        """
        self._unremoved.add(video.id)
        running = self._running.get(video.id)
        if video in self._waiting:
            self._waiting.remove(video)
        self._unstored.pop(video.id, None)
        self.resolved.drop(video.id)
        if running is not None:
            running.removed, video.unwanted = True, True
            running.cancel()
        else:
            self.lives.end(video)
            await asyncio.to_thread(self._folders.remove, video.id)
        self.hub.publish(video.owner, video.id, "deleted", {"id": video.id})
        self.hub.ended(video.id)
        self.board.moved()
        await self._remove(video.id)

    def check_waiting(self, video: Video) -> None:
        """Raises RefusedError unless a video waits."""
        if video not in self._waiting:
            state = "running" if video.status == "in_progress" else video.status
            what = f"the video is {state}, and only waiting ones can be changed"
            raise RefusedError(what, 409, code="not_waiting")

    async def change(self, video: Video) -> None:
        """Stores a waiting video whose options or files have changed."""
        self.board.publish(video)
        await self._put(video)

    async def move(self, video: Video, position: int) -> None:
        """Moves a waiting video to a position among its owner's, which keep their places among all.

        Positions count from 1; a larger one than there are videos is the last.
        """
        own = [one for one in self._waiting if one.owner == video.owner]
        ranks = [one.rank for one in own]
        own.remove(video)
        own.insert(min(position - 1, len(own)), video)
        moved = [one for one, rank in zip(own, ranks, strict=True) if one.rank != rank]
        for one, rank in zip(own, ranks, strict=True):
            one.rank = rank
        self._waiting.sort(key=lambda one: one.rank)
        self.board.moved()
        await self._store.change(lambda connection: stored.put(connection, *moved))

    # What workers ask for.

    async def begin(self, video: Video, cancel: Callable[[], None]) -> None:
        """Stores that a video runs; ``cancel`` has its worker end it."""
        self._running[video.id].cancel = cancel
        self.board.publish(video)
        self.board.moved()
        await self._put(video)

    def take(self, event: Event) -> None:
        """Records and publishes what a worker does for a video."""
        if (running := self._running.get(event.id)) is not None:
            self.board.take(running, event)

    async def plays(self, fragment: Fragment) -> None:
        """Records and publishes that more of a live video plays; what begins with a prompt is stored."""
        if (video := self.lives.take(fragment)) is not None and video.live is not None:
            self.board.publish(video)
            if video.live.prompts[-1].first == fragment.first:
                await self._put(video)

    async def ended(self, outcome: Outcome, shared: float | None = None) -> None:
        """Records how a job ended, and for how many seconds its worker had the one before it too."""
        video = self._running[outcome.id].video
        if isinstance(outcome.error, CancelledError) and video.unwanted:
            await self._end(video, "cancelled")
        elif isinstance(outcome.error, CancelledError):  # the server ends
            video.attempts -= 1
            await self.put_back(video)
        elif outcome.error is not None:
            await self.failed(video, *code_of(outcome.error))
        else:
            video.resolved, video.seconds = outcome.metadata, outcome.seconds
            video.warnings = [self.board.told(warning, video) for warning in outcome.warnings]
            times = self.board.estimates.learn(video, outcome.seconds, outcome.steps, shared)
            self._metrics.phases(outcome.seconds)
            await self._end(video, "completed", times)

    async def failed(self, video: Video, code: str, message: str) -> None:
        """Records why a video cannot be made."""
        video.error = Failure(code, self.board.told(message, video))
        await self._end(video, "failed")

    async def again(self, video: Video, reason: str) -> bool:
        """Queues a video again if it was not tried too often; returns whether it may run."""
        if video.attempts >= self._settings.attempts or video.plays:
            return False
        tell("runs again", WARNING, id=video.id, reason=reason)
        await self.put_back(video)
        return True

    async def lost(self, video: Video, code: int, reason: str, *, told: bool, alone: bool) -> None:
        """Handles the end of a worker that had a video.

        ``code`` is the exit code, negative for a signal, and ``reason`` the same in words. ``told`` says that
        the worker had begun the video, ``alone`` that no other video of the worker may be to blame.
        """
        if (from_outside(code) or not told or not alone) and await self.again(video, reason):
            return
        if video.wants_no_more:
            await self._end(video, "cancelled")
        else:
            times = f" (attempt {video.attempts})" if video.attempts > 1 else ""
            what = f"the process that made the video has ended: {reason}{times}"
            await self.failed(video, "worker_died", what)

    async def put_back(self, video: Video) -> None:
        """Puts a video that a worker had back to its place, or ends one that is to be cancelled."""
        if video.unwanted or video.plays:
            video.stopped_by("server")
            await self._end(video, "cancelled")
            return
        video.status, video.started = "queued", None
        self._running.pop(video.id, None)
        if self.lives.again(video):
            self.resolved.drop(video.id)
        bisect.insort(self._waiting, video, key=lambda one: one.rank)
        self.turns.look_again()
        self.board.publish(video)
        self.board.moved()
        await self._put(video)

    def nothing_loads(self) -> bool:
        """Counts a worker that could not load the artifact; returns whether none ever could."""
        self._broken += 1
        return not self.loads and self._broken >= self.board.workers

    async def _end(self, video: Video, status: Any, times: dict[str, float] | None = None) -> None:
        """Stores and publishes that a video has ended."""
        await self.lives.join(video)
        stopped = status == "cancelled" and video.plays
        video.status, video.ended = "completed" if stopped else status, time.time()
        self.resolved.drop(video.id)
        self.lives.end(video)
        running = self._running.pop(video.id, None)
        removed = running is not None and running.removed
        if not removed:
            self._unstored[video.id] = video
        if not video.plays:  # clips of an attempt that was cut off, whose worker continues none
            await asyncio.to_thread(self._folders.clear, video)
        self._metrics.ended(video)
        tell(
            video.status, WARNING if video.error else INFO, id=video.id, seconds=video.took, error=video.error
        )
        try:
            await self._store_end(video, times or {})
        finally:  # an end that could not be stored is known all the same, and stored later
            if removed:
                await asyncio.to_thread(self._folders.remove, video.id)
            else:
                self.board.publish(video)
            self.board.moved()

    async def _store_end(self, video: Video, times: dict[str, float]) -> None:
        """Stores that a video has ended; then fragments that are one file go, which a start may need."""

        def put(connection: sqlite3.Connection) -> None:
            stored.put_times(connection, times)
            stored.put(connection, video)

        video.bytes = await asyncio.to_thread(self._folders.size, video.id)
        await self._store.change(put)
        if video.live is None or await asyncio.to_thread(self._folders.live(video).clear):
            self._unstored.pop(video.id, None)

    async def _put(self, video: Video) -> None:
        """Stores a video that has changed."""
        await self._store.change(lambda connection: stored.put(connection, video))

    async def _remove(self, id: str) -> None:
        """Stores that a video is forgotten."""
        await self._store.change(lambda connection: stored.remove(connection, id))
        self._unremoved.discard(id)

    async def store_again(self) -> None:
        """Stores the ends of videos, and that videos are forgotten, where that could not be stored."""
        for id in list(self._unremoved):
            await self._remove(id)
        for video in list(self._unstored.values()):
            await self.lives.join(video)
            await self._store_end(video, {})

    # What is known.

    @property
    def waiting(self) -> list[Video]:
        """The waiting videos, the next one first."""
        return self._waiting

    @property
    def running(self) -> int:
        """The number of videos that run."""
        return len(self._running)
