"""The jobs of a server: takes, orders, changes, cancels and forgets them, and hands them to workers.

What is stored is the truth at a start. While the server runs, the jobs that wait or run are in memory too. A
change of theirs is made there first, in one step of the event loop, and then stored.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import signal
import sqlite3
import time
from collections.abc import Callable
from typing import Any

from wanserve import store as stored
from wanserve.board import Board
from wanserve.folders import Folders
from wanserve.hub import Hub
from wanserve.job import Failure, Job, Live
from wanserve.messages import Done, Now
from wanserve.metrics import Metrics
from wanserve.refusal import RefusedError, closing
from wanserve.room import Room, frames_bytes
from wanserve.running import Running
from wanserve.settings import Settings
from wanserve.store import Store

LOG = logging.getLogger("wanserve")

ROOM_SECONDS = 2.0
"""After which a job that waits for room on the disk looks again."""

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""Signals by which a worker is ended from outside, for want of memory too; others are its own crash."""


class Desk:
    """The jobs.

    Args:
        settings: the limits.
        folders: the files.
        store: the stored jobs.
        hub: who is told of changes.
        metrics: what is counted.
    """

    def __init__(
        self, settings: Settings, folders: Folders, store: Store, hub: Hub, metrics: Metrics
    ) -> None:
        self._settings, self._folders, self._store = settings, folders, store
        self.hub, self._metrics = hub, metrics
        self.room = Room(settings.data, settings.keep_seconds is not None or settings.keep_bytes is not None)
        self._waiting: list[Job] = []
        self._running: dict[str, Running] = {}
        self.board = Board(settings, folders, hub, self._waiting, self._running, store.times())
        self._unstored: dict[str, Job] = {}
        self._unremoved = set[str]()
        self._wake = asyncio.Event()
        self._broken = 0
        self._lacks: str | None = None
        self.closing = self.loads = False

    async def restore(self) -> None:
        """Takes what is stored: what was running waits again, and files of no job are removed."""

        def again(connection: sqlite3.Connection) -> tuple[set[str], set[str]]:
            for job in stored.jobs_with(connection, "in_progress"):
                job.status = "cancelled" if job.unwanted else "queued"
                job.ended = time.time() if job.unwanted else None
                job.attempts -= 1  # the server has ended, and not by the job's fault
                stored.put(connection, job)
            known = {id for (id,) in connection.execute("SELECT id FROM videos")}
            return known, set(stored.removed(connection))

        unknown = await asyncio.to_thread(self._folders.clean, *await self._store.change(again))
        await self._store.change(stored.forget_removed)
        if unknown:
            LOG.warning("%d folders in %s are of no known job, and stay", len(unknown), unknown[0].parent)
        self._waiting[:] = self._store.waiting()
        self._wake.set()

    # What clients ask for.

    async def accept(self, job: Job, keep: Callable[[], None], owner_limit: int | None = None) -> Job:
        """Stores a new job at the end of the queue; returns it, or the one that its idempotency key has.

        Args:
            job: the job.
            keep: puts its files in place; they stay where they are if another job is returned.
            owner_limit: the most jobs of its owner that may wait; None for no such limit.

        Raises:
            RefusedError: if the queue is full, or the key is that of another request.
        """
        retry = str(self.board.retry_seconds())
        if self.closing:
            raise closing()

        def put(connection: sqlite3.Connection) -> Job:
            if job.idempotency is not None:
                other = stored.with_key(connection, job.owner, job.idempotency)
                if other is not None and other.id in self._unremoved:
                    stored.remove(connection, other.id)
                    other = None
                if other is not None and other.fingerprint != job.fingerprint:
                    raise RefusedError(
                        "the Idempotency-Key was used for another request; choose a new one",
                        409,
                        code="idempotency_conflict",
                    )
                if other is not None:
                    return other
            for owner, limit in ((None, self._settings.max_waiting), (job.owner, owner_limit)):
                if limit is not None and stored.count(connection, "queued", owner) >= limit:
                    whose = "the queue is full" if owner is None else "too many jobs of this key wait"
                    raise RefusedError(
                        f"{whose}; expected at most {limit}; try again later",
                        429,
                        code="queue_full",
                        headers={"Retry-After": retry},
                    )
            job.rank = stored.last_rank(connection) + 1.0
            keep()
            stored.add(connection, job)
            return job

        try:
            kept = await self._store.change(put)
        except Exception:
            await asyncio.to_thread(self._folders.remove, job.id)  # of a commit that has failed
            raise
        if kept is job:
            bisect.insort(self._waiting, job, key=lambda one: one.rank)
            self._wake.set()
            self.board.publish(job)
        return self._here(kept.id) or kept

    def find(self, id: str, owner: str | None) -> Job:
        """Returns a job of an owner; None is everybody.

        Raises:
            RefusedError: if there is none.
        """
        job = self._here(id) or self._store.find(id)
        if id in self._unremoved or ((running := self._running.get(id)) is not None and running.removed):
            job = None
        if job is None or owner not in (None, job.owner):
            raise RefusedError(f"there is no video {id[:60]!r}", 404, code="not_found", param="id")
        return job

    def _here(self, id: str) -> Job | None:
        """Returns a job that is in memory: it waits, runs, or has ended and is not stored yet."""
        if (running := self._running.get(id)) is not None:
            return running.job
        return self._unstored.get(id) or next((one for one in self._waiting if one.id == id), None)

    def current(self, jobs: list[Job]) -> list[Job]:
        """Returns stored jobs as they are in memory, without those that are forgotten."""
        here = {job.id: job for job in self._waiting} | self._unstored
        here |= {id: running.job for id, running in self._running.items()}
        return [here.get(job.id, job) for job in jobs if job.id not in self._unremoved]

    async def cancel(self, job: Job) -> None:
        """Cancels a job: one that waits at once, one that runs as soon as its worker looks.

        Raises:
            RefusedError: if it has ended already.
        """
        if job.over:
            raise RefusedError(f"the video is {job.status} already", 409, code="already_ended")
        if (running := self._running.get(job.id)) is not None:
            job.unwanted, running.live.phase = True, "cancelling"
            running.cancel()
            self.board.publish(job)
            await self._put(job)
            return
        self.check_waiting(job)
        self._waiting.remove(job)
        await self._end(job, "cancelled")

    async def delete(self, job: Job) -> None:
        """Forgets a job and its files; one that runs is cancelled, and its files go when it has ended.

        The files of others go first: on a full disk that makes the room to store that they are gone. If that
        cannot be stored yet, the job is forgotten all the same, and it is stored later.
        """
        self._unremoved.add(job.id)
        running = self._running.get(job.id)
        if job in self._waiting:
            self._waiting.remove(job)
        self._unstored.pop(job.id, None)
        if running is not None:
            running.removed, job.unwanted = True, True
            running.cancel()
        else:
            await asyncio.to_thread(self._folders.remove, job.id)
        self.hub.publish(job.owner, job.id, "deleted", {"id": job.id})
        self.board.moved()
        await self._remove(job.id)

    def check_waiting(self, job: Job) -> None:
        """Raises RefusedError unless a job waits."""
        if job not in self._waiting:
            state = "running" if job.status == "in_progress" else job.status
            raise RefusedError(
                f"the video is {state}, and only waiting ones can be changed", 409, code="not_waiting"
            )

    async def change(self, job: Job) -> None:
        """Stores a waiting job whose options or files have changed."""
        self.board.publish(job)
        await self._put(job)

    async def move(self, job: Job, position: int) -> None:
        """Moves a waiting job to a position among its owner's, which keep their places among all.

        Args:
            job: the job.
            position: from 1; a larger one than there are jobs is the last.
        """
        own = [one for one in self._waiting if one.owner == job.owner]
        ranks = [one.rank for one in own]
        own.remove(job)
        own.insert(min(position - 1, len(own)), job)
        moved = [one for one, rank in zip(own, ranks, strict=True) if one.rank != rank]
        for one, rank in zip(own, ranks, strict=True):
            one.rank = rank
        self._waiting.sort(key=lambda one: one.rank)

        def put(connection: sqlite3.Connection) -> None:
            for one in moved:
                stored.put(connection, one)

        self.board.moved()
        await self._store.change(put)

    # What workers ask for.

    async def next(self) -> Job:
        """Waits for a job that has the room that it needs, and returns the first; it runs from now on."""
        while (job := self._fitting()) is None:
            self._wake.clear()
            looks_again = ROOM_SECONDS if self._waiting and not self.closing else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(looks_again):
                    await self._wake.wait()
        self._waiting.remove(job)
        job.status, job.started, job.attempts = "in_progress", time.time(), job.attempts + 1
        self._running[job.id] = Running(job, Live(phase="loading", steps=job.shape["num_steps"]))
        return job

    def _fitting(self) -> Job | None:
        """The first waiting job whose frames have room beside those of the jobs that run."""
        if self.closing or not self._waiting or self.lack():
            return None
        left = self.room.left() - sum(frames_bytes(one.job) for one in self._running.values())
        return next((job for job in self._waiting if frames_bytes(job) <= left), None)

    def lack(self) -> str | None:
        """Returns what there is too little of for any job; None for nothing. A change is logged."""
        problem = self.room.lack()
        if problem != self._lacks:
            LOG.warning("%s", problem or "there is room again")
        self._lacks = problem
        return problem

    async def begin(self, job: Job, cancel: Callable[[], None]) -> None:
        """Stores that a job runs; ``cancel`` tells its worker to end it."""
        self._running[job.id].cancel = cancel
        await self._put(job)
        self.board.publish(job)
        self.board.moved()

    def now(self, message: Now) -> None:
        """Takes what a worker does for a job."""
        if (running := self._running.get(message.id)) is not None:
            running.now(message)
            self.board.publish(running.job)

    async def done(self, message: Done) -> None:
        """Takes the end of a job that has its videos."""
        job = self._running[message.id].job
        job.resolved, job.seconds = message.resolved, message.seconds
        job.warnings = [self.board.told(warning, job) for warning in message.warnings]
        times = self.board.estimates.learn(job, message.seconds, message.steps)
        self._metrics.phases(message.seconds)
        await self._end(job, "completed", lambda connection: stored.put_times(connection, times))

    async def failed(self, id: str, code: str, message: str) -> None:
        """Takes the failure of a job."""
        job = self._running[id].job
        job.error = Failure(code, self.board.told(message, job))
        await self._end(job, "failed")

    async def cancelled(self, id: str) -> None:
        """Takes that a job was cancelled, and its device is free."""
        await self._end(self._running[id].job, "cancelled")

    async def lost(self, job: Job, code: int, reason: str, told: bool = True) -> None:
        """Takes that the worker of a job has ended.

        Args:
            job: the job.
            code: the exit code, negative for a signal.
            reason: the same in words.
            told: whether the worker had begun the job.
        """
        if (-code in _FROM_OUTSIDE or not told) and job.attempts < self._settings.attempts:
            LOG.warning("%s runs again: %s", job.id, reason)
            await self.put_back(job)
        elif job.unwanted:
            await self._end(job, "cancelled")
        else:
            times = f" (attempt {job.attempts})" if job.attempts > 1 else ""
            what = f"the process that made the video has ended: {reason}{times}"
            await self.failed(job.id, "worker_died", what)

    async def put_back(self, job: Job) -> None:
        """Lets a running job wait again, at its place; one that is to be cancelled is."""
        if job.unwanted:
            await self._end(job, "cancelled")
            return
        job.status, job.started = "queued", None
        self._running.pop(job.id, None)
        bisect.insort(self._waiting, job, key=lambda one: one.rank)
        self._wake.set()
        self.board.publish(job)
        self.board.moved()
        await self._put(job)

    def nothing_loads(self) -> bool:
        """Takes that a worker could not load the artifact; returns whether none ever could."""
        self._broken += 1
        return not self.loads and self._broken >= self.board.workers

    async def _end(
        self, job: Job, status: Any, also: Callable[[sqlite3.Connection], None] = lambda connection: None
    ) -> None:
        """Stores that a job has ended, and tells of it."""

        def put(connection: sqlite3.Connection) -> None:
            also(connection)
            stored.put(connection, job)

        job.status, job.ended = status, time.time()
        running = self._running.pop(job.id, None)
        removed = running is not None and running.removed
        if not removed:
            self._unstored[job.id] = job
        job.bytes = await asyncio.to_thread(self._folders.size, job.id)
        self._metrics.ended(job)
        try:
            await self._store.change(put)
            self._unstored.pop(job.id, None)
        finally:  # an end that could not be stored is known all the same, and stored later
            if removed:
                await asyncio.to_thread(self._folders.remove, job.id)
            else:
                self.board.publish(job)
            self.board.moved()

    async def _put(self, job: Job) -> None:
        """Stores a job that has changed."""
        await self._store.change(lambda connection: stored.put(connection, job))

    async def _remove(self, id: str) -> None:
        """Stores that a job is forgotten."""
        await self._store.change(lambda connection: stored.remove(connection, id))
        self._unremoved.discard(id)

    async def store_again(self) -> None:
        """Stores the ends of jobs, and that jobs are forgotten, where that could not be stored."""
        for id in list(self._unremoved):
            await self._remove(id)
        for job in list(self._unstored.values()):
            await self._put(job)
            self._unstored.pop(job.id, None)

    # What is known.

    @property
    def waiting(self) -> list[Job]:
        """The waiting jobs, the next one first."""
        return self._waiting

    @property
    def running(self) -> int:
        """The number of jobs that run."""
        return len(self._running)
