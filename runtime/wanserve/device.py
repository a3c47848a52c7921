"""A device at work: hands jobs to its worker one by one, and starts another worker when one has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from wanserve.desk import Desk
from wanserve.job import Job
from wanserve.messages import (
    Broken,
    Cancel,
    Cancelled,
    Done,
    Failed,
    Now,
    Ready,
    Run,
    line,
    of_worker,
)
from wanserve.metrics import Metrics
from wanserve.process import WorkerProcess, how

LOG = logging.getLogger("wanserve")

MOST_SECONDS: Final = 60.0
"""The longest pause before another worker is started."""

GOOD_SECONDS: Final = 60.0
"""A worker that has lived so long, or made a video, is followed by another one at once."""

LINE_BYTES: Final = 16 << 20
"""The longest message: options with prompts of 100 000 characters."""


class BrokenError(Exception):
    """The first worker could not load the artifact: there is nothing to serve (``exit_code``)."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Device:
    """One device.

    Args:
        desk: where the jobs come from.
        start: starts a worker.
        job_of: returns the message that lets a worker make a job.
        metrics: what is counted.
        first: a worker that was started already.
    """

    def __init__(
        self,
        desk: Desk,
        start: Callable[[], WorkerProcess],
        job_of: Callable[[Job], Run],
        metrics: Metrics,
        first: WorkerProcess | None = None,
    ) -> None:
        self._desk, self._start, self._job_of, self._metrics = desk, start, job_of, metrics
        self._process = first
        self._job: Job | None = None
        self._free = asyncio.Event()
        self._free.set()
        self._worked = False
        self.ready = asyncio.Event()
        self.problem: str | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """The number of the worker's process."""
        return None if self._process is None else self._process.pid

    async def keep(self) -> None:
        """Keeps a worker at work until ``stop``.

        Raises:
            BrokenError: if the first worker could not load the artifact.
        """
        failures, ever = 0, False
        while not self._stopping:
            began, self._worked = time.monotonic(), False
            if (process := self._process) is None:
                process = self._process = await asyncio.to_thread(self._start)
            broken = await self._session(process)
            ever = ever or self._worked or self.ready.is_set()
            self.ready.clear()
            code = await asyncio.to_thread(process.wait)
            self._process = None
            await self._after(code)
            if self._stopping:
                return
            if broken is not None and not ever:
                raise BrokenError(broken.message, broken.exit_code)
            self.problem = how(code) if broken is None else broken.message
            self._metrics.restarted()
            good = self._worked or time.monotonic() - began > GOOD_SECONDS
            failures = 0 if good else failures + 1
            pause = 0.0 if failures < 2 else min(2.0 ** (failures - 2), MOST_SECONDS)
            LOG.warning("a worker has ended (%s); another one starts in %g s", self.problem, pause)
            await asyncio.sleep(pause)

    async def _after(self, code: int) -> None:
        """Lets the job of a worker that has ended run again, or fail."""
        if self._stopping:
            return  # ``stop`` puts the job back
        job, self._job = self._job, None
        if job is not None:
            with self._stored():
                await self._desk.lost(job, code, how(code))
        self._free.set()

    async def _session(self, process: WorkerProcess) -> Broken | None:
        """Talks to a worker until it ends; returns why it could not load the artifact."""
        reader, writer = await asyncio.open_connection(sock=process.socket, limit=LINE_BYTES)
        listening = asyncio.create_task(self._listen(reader))
        working = asyncio.create_task(self._work(writer))
        await asyncio.wait({listening, working}, return_when=asyncio.FIRST_COMPLETED)
        for task in (listening, working):
            task.cancel()
        results = await asyncio.gather(listening, working, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                LOG.error("a worker is ended", exc_info=result)
                process.kill()
        writer.close()
        return results[0] if isinstance(results[0], Broken) else None

    async def _listen(self, reader: asyncio.StreamReader) -> Broken | None:
        """Takes what the worker says, until it ends."""
        while data := await self._line(reader):
            message = of_worker(data)
            match message:
                case Ready():
                    self.problem = None
                    self.ready.set()
                case Broken():
                    return message
                case Now():
                    self._desk.now(message)
                case Done() | Failed() | Cancelled():
                    await self._ended(message)
        return None

    @staticmethod
    async def _line(reader: asyncio.StreamReader) -> bytes:
        """Returns the next whole line; empty at the end, also in the middle of one."""
        try:
            data = await reader.readline()
        except ConnectionError:
            return b""
        return data if data.endswith(b"\n") else b""

    async def _ended(self, message: Done | Failed | Cancelled) -> None:
        """Takes the end of a job."""
        with self._stored():
            if isinstance(message, Done):
                await self._desk.done(message)
            elif isinstance(message, Failed):
                await self._desk.failed(message.id, message.code, message.message)
            else:
                await self._desk.cancelled(message.id)
        self._worked, self._job = True, None
        self._free.set()

    @contextlib.contextmanager
    def _stored(self) -> Iterator[None]:
        """Says in the log what could not be stored: the server goes on."""
        try:
            yield
        except sqlite3.Error as error:
            LOG.error("the state of a job cannot be stored: %s", error)

    async def _work(self, writer: asyncio.StreamWriter) -> None:
        """Hands jobs to the worker."""
        await self.ready.wait()
        while True:
            self._job = await self._desk.next()
            self._free.clear()
            cancel = partial(writer.write, line(Cancel(self._job.id)))
            with self._stored():
                await self._desk.begin(self._job, cancel)
            writer.write(line(await asyncio.to_thread(self._job_of, self._job)))
            if self._job.unwanted:  # since before the worker knew the job
                cancel()
            await writer.drain()
            await self._free.wait()

    def hurry(self) -> None:
        """Lets ``stop`` wait no longer."""
        self._free.set()

    async def stop(self, seconds: float) -> None:
        """Ends the worker: a job that runs may end within so many seconds; after that it waits again."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._free.wait()
        if (process := self._process) is not None:
            process.kill()
        if self._job is not None:
            job, self._job = self._job, None
            job.attempts -= 1  # it was not the job's fault
            with self._stored():
                await self._desk.put_back(job)
