"""A device at work: has its worker make videos in a line, and starts another worker when one has ended."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from wanrun import CancelToken, Event, Outcome
from wanrun.errors import CancelledError, WanError, lacks_space
from wanserve.builds import Builds
from wanserve.held import Held
from wanserve.log import LOG, WARNING, tell
from wanserve.messages import (
    NO_ROOM,
    Broken,
    Cancel,
    ChangedError,
    Fragment,
    Look,
    Make,
    OutOfMemoryError,
    Preview,
    Ready,
    code_of,
    line,
    of_worker,
)
from wanserve.metrics import Metrics
from wanserve.process import WorkerProcess, from_outside, how
from wanserve.progress import BUILD
from wanserve.queue import Queue
from wanserve.refusal import RefusedError
from wanserve.video import Video

MOST_SECONDS: Final = 60.0
"""The longest pause before another worker is started."""

GOOD_SECONDS: Final = 60.0
"""A worker that has lived so long, or made a video, is followed by another one at once."""

LINE_BYTES: Final = 16 << 20
"""The longest message: options with prompts of 100 000 characters."""


class Device:
    """A device and its worker.

    ``start`` starts a worker, and ``first`` is one that was started already. ``make`` returns the message
    that has a worker make a video; ``builds`` builds the profiles that videos lack, if any are built.
    ``place`` has the environment variables that give the device. ``ready`` is set while a first step could
    run, ``loaded`` names the models that the worker holds, and ``problem`` is why the last worker has ended,
    until the next one is ready.
    """

    def __init__(
        self,
        queue: Queue,
        start: Callable[[], WorkerProcess],
        make: Callable[[Video], Make],
        metrics: Metrics,
        first: WorkerProcess | None = None,
        builds: Builds | None = None,
        place: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._queue, self._start, self._make, self._metrics = queue, start, make, metrics
        self._process = first
        self._held, self._builds, self._place = Held(), builds, place
        self._lacking: Video | None = None
        self._building = CancelToken()
        self._stopping, self._hurried = asyncio.Event(), asyncio.Event()
        self._worked = False
        self.ready = asyncio.Event()
        self.loaded: list[str] = []
        self.problem: str | None = None

    async def keep(self) -> None:
        """Keeps a worker at work until ``stop``.

        Raises WanError if no worker of any device could load the artifact: that of the last one.
        """
        failures = 0
        while not self._stopping.is_set():
            began, self._worked, self._held.leaving = time.monotonic(), False, False
            self._know()
            try:
                if (process := self._process) is None:
                    process = await asyncio.to_thread(self._start)
            except OSError as error:  # no more processes or files: later, perhaps
                self.problem = f"a worker cannot be started: {error.strerror}"
            else:
                self._process = process
                if self._stopping.is_set():
                    process.kill()
                self.problem = await self._lived(process)
            if (lacking := self._lacking) is not None:
                await self._build(lacking)
                continue
            if self._stopping.is_set():
                return
            self._metrics.restarted()
            good = self._worked or time.monotonic() - began > GOOD_SECONDS
            failures = 0 if good else failures + 1
            pause = 0.0 if failures < 2 else min(2.0 ** (failures - 2), MOST_SECONDS)
            tell("worker ended", WARNING, reason=self.problem, next_in_seconds=pause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()

    def _know(self) -> None:
        """Keeps which profiles are built as a worker starts."""
        if (builds := self._builds) is not None:
            self._lacking, self._building = None, CancelToken()
            self._held.lacks, self._held.waits = partial(builds.lacks, known=builds.known), builds.waits

    async def _build(self, video: Video) -> None:
        """Has the profile of a video built if it is lacking; the video is the next one then."""
        assert self._builds is not None
        self.problem = "the device is left for a build"
        self._queue.take(Event(video.id, BUILD))
        if video.unwanted:
            self._building.cancel()
        with self._stored():
            try:
                await self._builds.build(video, self._place, self._building)
            except CancelledError:
                pass  # by a client, or since the server ends: then the video waits for the next start
            except Exception as error:
                LOG.error("%s cannot be built for %s", video.shape["profile"], video.id, exc_info=error)
                await self._queue.failed(video, *_not_built(error))
            if not video.over:
                video.attempts -= 1
                await self._queue.put_back(video)
        if self._builds.busy is video:
            self._builds.busy = None
        self._held.drop(video)
        self._queue.turns.look_again()

    async def _lived(self, process: WorkerProcess) -> str:
        """Talks to a worker until it has ended, and returns why it has."""
        broken = await self._session(process)
        self.ready.clear()
        self.loaded = []
        code = await asyncio.to_thread(process.wait)
        self._process = None
        if not (self._stopping.is_set() or self._lacking):  # else ``settle`` or ``_build`` has the videos
            await self._after(code)
        if broken is None:
            return how(code)
        if self._queue.nothing_loads():
            raise broken.error
        return str(broken.error)

    async def _after(self, code: int) -> None:
        """Queues the videos of a worker that has ended again, or fails them."""
        alone, videos = self._held.alone, self._held.videos
        if len(videos) > 1 and from_outside(code):  # for want of memory, maybe
            self._held.most = 1
        for video in videos:
            with self._stored():
                await self._queue.lost(video, code, how(code), told=self._held.told(video), alone=alone)
            self._held.drop(video)

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
        if self._lacking is not None:
            process.kill()
        writer.close()
        return results[0] if isinstance(results[0], Broken) else None

    async def _listen(self, reader: asyncio.StreamReader) -> Broken | None:
        """Reads what the worker says, until it ends."""
        while data := await self._line(reader):
            message = of_worker(data)
            match message:
                case Ready():
                    if not self.ready.is_set():
                        tell("worker ready")
                    self.problem, self._queue.loads, self.loaded = None, True, message.loaded
                    self.ready.set()
                case Broken():
                    return message
                case Event():
                    self._queue.take(message)
                    if self._held.take(message):
                        self._queue.turns.look_again()
                case Preview():
                    self._queue.board.show(message)
                case Fragment():
                    with self._stored():
                        await self._queue.plays(message)
                case Outcome():
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

    async def _ended(self, outcome: Outcome) -> None:
        """Records the end of a job."""
        held, full = self._held, isinstance(outcome.error, OutOfMemoryError)
        if (video := next((one for one in held.videos if one.id == outcome.id), None)) is None:
            return
        alone = held.alone
        held.leaving = held.leaving or full
        held.most = held.most if alone or not full else 1
        with self._stored():
            if isinstance(outcome.error, ChangedError):
                await self._withhold(video, str(outcome.error))
            elif not (full and not alone and await self._queue.again(video, str(outcome.error))):
                await self._queue.ended(outcome, held.shared(video))
        self._worked = True
        held.drop(video)
        self._queue.turns.look_again()

    async def _withhold(self, video: Video, why: str) -> None:
        """Withholds all videos of a model until the next start of the server."""
        tell("model withheld", WARNING, model=video.model, reason=why)
        self._queue.withheld[video.model] = self._queue.board.told(why)
        for one in (video, *self._queue.waiting):
            if one.model == video.model:
                self._queue.hub.ended(one.id)
        video.attempts -= 1  # it was not the video's fault
        await self._queue.put_back(video)

    @contextlib.contextmanager
    def _stored(self) -> Iterator[None]:
        """Says in the log what could not be stored: the server goes on."""
        try:
            yield
        except sqlite3.Error as error:
            LOG.error("the state of a job cannot be stored: %s", error)

    async def _work(self, writer: asyncio.StreamWriter) -> None:
        """Hands videos to the worker: the next one when it may be begun."""
        await self.ready.wait()
        while True:
            video = await self._queue.turns.next(self._held)
            if self._builds is not None and self._held.lacks(video):
                self._lacking = video
                if self._builds.lacks(video):  # else it was built since this worker was started
                    self._builds.busy = video
                with self._stored():
                    await self._queue.begin(video, self._building.cancel)
                return
            tell("begun", id=video.id, attempt=video.attempts if video.attempts > 1 else None)
            try:
                writer.write(line(await asyncio.to_thread(self._make, video)))
            except (KeyError, OSError, WanError, RefusedError) as error:
                LOG.error("%s cannot be begun: %r", video.id, error)
                with self._stored():
                    await self._queue.failed(video, *_not_begun(error))
                self._held.drop(video)
                continue
            cancel = partial(writer.write, line(Cancel(video.id)))
            if video.unwanted:  # since before the worker knew the video
                cancel()
            self._queue.board.looked_at(video, partial(writer.write, line(Look(video.id))))
            self._queue.lives.begin(video, lambda message: writer.write(line(message)))
            with self._stored():  # while the worker begins: no video is lost if that is not stored
                await self._queue.begin(video, cancel)
            await writer.drain()

    def hurry(self) -> None:
        """Ends the waiting of ``stop``."""
        self._hurried.set()

    async def stop(self, seconds: float) -> None:
        """Ends the worker; videos that run may end within so many seconds. ``keep`` ends after it."""
        self._stopping.set()
        waits = [asyncio.create_task(event.wait()) for event in (self._held.empty, self._hurried)]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()
        self._building.cancel()
        if (process := self._process) is not None:
            process.kill()

    async def settle(self) -> None:
        """Queues the videos of a worker that ``stop`` has ended for the next start; after ``keep``."""
        for video in self._held.videos:
            self._held.drop(video)
            if not video.over:
                video.attempts -= 1  # it was not the video's fault
                with self._stored():
                    await self._queue.put_back(video)


def _not_begun(error: Exception) -> tuple[str, str]:
    """Returns the code and the message of a video that no worker was given."""
    if isinstance(error, RefusedError):  # its artifact has changed since it was accepted
        return error.code, str(error)
    if isinstance(error, WanError):
        return code_of(error)
    if lacks_space(error):
        return "no_space", NO_ROOM
    return "not_begun", "the model or the disk is not there any more"


def _not_built(error: Exception) -> tuple[str, str]:
    """Returns the code and the message of a video whose profile cannot be built; commands are for the log."""
    if lacks_space(error):
        return "no_space", NO_ROOM
    found = f": {error.found}" if isinstance(error, WanError) and error.found else ""
    what = error.what if isinstance(error, WanError) else "the profile cannot be built"
    return "build_failed", f"{what}{found}"
