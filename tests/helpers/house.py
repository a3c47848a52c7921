"""A queue with a device, whose workers are threads of the test, and videos for it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import wanrun
from helpers.options import generation
from wanrun import Event, Outcome
from wanrun.errors import CancelledError, UsageError
from wanserve.database import VideoDatabase
from wanserve.device import Device
from wanserve.folders import Folders
from wanserve.messages import Broken, Cancel, Make, Ready, line, to_worker
from wanserve.metrics import Metrics
from wanserve.publisher import Publisher
from wanserve.queue import Queue
from wanserve.settings import Settings
from wanserve.video import Video

Talk = Callable[["Worker", str], Any]


class Worker:
    """What a process of a worker is for a device: a socket, and an exit code."""

    def __init__(self, talk: Talk, code: int = 0, first: Any = None) -> None:
        self.socket, self._theirs = socket.socketpair()
        self.runs, self.pid, self._code = list[str](), 0, code
        self._talk, self._first = talk, first or Ready(["toy"])
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def say(self, message: Any) -> None:
        self._theirs.sendall(line(message))

    def _live(self) -> None:
        with (
            self._theirs,
            self._theirs.makefile("rb") as lines,
            contextlib.suppress(OSError),  # killed, maybe before its first word
        ):
            self.say(self._first)
            if isinstance(self._first, Broken):
                return
            for data in lines:
                message = to_worker(data)
                if isinstance(message, Make):
                    self.runs.append(message.job.id)
                    if self._talk(self, message.job.id) == "ends":
                        return
                elif isinstance(message, Cancel):
                    self.say(cancelled(message.id))

    def wait(self) -> int:
        self._thread.join()
        return self._code

    def kill(self, code: int = -9) -> None:
        self._code = code
        with contextlib.suppress(OSError):
            self._theirs.shutdown(socket.SHUT_RDWR)


def cancelled(id: str) -> Outcome:
    return Outcome(id=id, error=CancelledError("cancelled", "it was cancelled"))


def makes(worker: Worker, id: str) -> None:
    """Makes a video at once."""
    worker.say(Event(id, "steps", 1, 1))
    worker.say(Outcome(id=id, seconds={"steps": 0.1}, steps=1))


def works_on(worker: Worker, id: str) -> None:
    worker.say(Event(id, "steps", 1, 9))


class House:
    """A queue with a device.

    Args:
        folder: of its videos.
        workers: what it starts, one after the other; ``start`` is called for each, if it is given.
        settings: of the server.

    Attributes:
        started: the workers that it has started.
    """

    def __init__(
        self, folder: Path, *workers: Worker, start: Callable[[], Worker] | None = None, **settings: Any
    ) -> None:
        self.started, self._left, self._begin = list[Worker](), iter(workers), start
        self.folders = Folders(folder)
        self.store = VideoDatabase(self.folders.database)
        self.settings = Settings({}, folder, **settings)
        self.queue = Queue(self.settings, self.folders, self.store, Publisher(), Metrics())
        self.device = self.another_device()

    def another_device(self, **more: Any) -> Device:
        return Device(self.queue, self._start, self.make, Metrics(), **more)  # type: ignore[arg-type]

    def _start(self) -> Worker:
        self.started.append(self._begin() if self._begin is not None else next(self._left))
        return self.started[-1]

    @staticmethod
    def make(video: Video) -> Make:
        if video.model == "gone":
            raise KeyError(video.model)
        if video.model == "other":
            raise UsageError("unknown_name", "it has no such profile any more")
        return make(video.id, video.model)

    async def ask(self, **fields: Any) -> Video:
        (one,) = await self.queue.accept((video(**fields), lambda: None))
        return one

    async def until(self, check: Callable[[], Any], seconds: float = 5) -> None:
        end = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < end
            await asyncio.sleep(0.005)

    async def over(self, *videos: Video) -> None:
        """Waits for the ends of videos."""
        await self.until(lambda: all(one.over for one in videos))

    @asynccontextmanager
    async def kept(self, seconds: float = 0) -> AsyncIterator[asyncio.Task[None]]:
        """Keeps the device while the block runs, and then stops it as the service does."""
        keeping = asyncio.create_task(self.device.keep())
        yield keeping
        self.queue.turns.closing = True
        await self.device.stop(seconds)
        async with asyncio.timeout(5):
            await asyncio.gather(keeping, return_exceptions=True)
        await self.device.settle()
        self.store.close()


def video(**fields: Any) -> Video:
    """A video of ten steps with these fields."""
    shape = {"profile": "p", "size": "96x64", "num_frames": 9, "num_videos": 1, "fps": 16.0, "num_steps": 10}
    plain = {"owner": "", "model": "m", "options": {"prompt": "x", "seed": 0}, "shape": shape, "created": 1.0}
    return Video(**{**plain, **fields})


def make(id: str, model: str, folder: Path = Path()) -> Make:
    """The message of a plain job, whose files are written into a folder."""
    outputs = wanrun.outputs_of(folder / "video.npy", 1, ("video", "thumbnail", "last_frame"))
    return Make(model, wanrun.pack(wanrun.Job(id, generation(), outputs)))
