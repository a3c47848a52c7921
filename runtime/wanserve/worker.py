"""The process that has a device: it loads artifacts and makes the videos of one job after another.

A crash of XLA ends it alone. The server starts another one.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import wanrun
from wanrun.errors import ArtifactError, CancelledError, NoSpaceError, WanError, lacks_space
from wanserve.folders import LAST_FRAME, THUMBNAIL
from wanserve.messages import (
    NO_ROOM,
    Begin,
    Broken,
    Cancel,
    Cancelled,
    Done,
    Failed,
    Now,
    OfWorker,
    Ready,
    Run,
    line,
    plain,
    to_worker,
)
from wanserve.pipelines import Pipelines, lacks_memory

if TYPE_CHECKING:
    from wanrun import Pipeline, Result

OUT_OF_MEMORY: Final = 12
"""Exit code of a worker that ends because a job has taken the memory."""

NICE: Final = 5
"""The server answers before the worker computes, where both need the CPU."""

_PHASES: Final = (
    ("encode_video", "encode"),
    ("decode", "decode"),
    ("denoise", "steps"),
    ("prepare", "steps"),
    ("encode_media", "media"),
    ("read_media", "media"),
    ("text", "text"),
)
"""Spans of ``wanrun`` and the phase that they are, the last one first: loading goes on beside them."""


class Watched(wanrun.Timings):
    """Timings that tell when a span begins or ends."""

    tell: Callable[[], None] | None = None

    def take(self, span: Any) -> None:
        super().take(span)
        if self.tell is not None:
            self.tell()

    def end(self, span: Any) -> None:
        super().end(span)
        if self.tell is not None:
            self.tell()


class Progress:
    """Tells the server what is done for a job, whenever that changes."""

    def __init__(self, id: str, send: Callable[[OfWorker], None]) -> None:
        self._id, self._send = id, send
        self._last: tuple[str, int, int | None] = ("", 0, None)
        self._step, self._steps = 0, None  # type: int, int | None
        self.timings = Watched(wanrun.Timings().now())
        self.timings.tell = self._look

    def step(self, done: int, total: int) -> None:
        """Takes a step; of ``generate``'s ``on_step``."""
        self._step, self._steps = done, total
        self._look()

    def _look(self) -> None:
        running = {span.phase for span in self.timings.running}
        phase = next((name for span, name in _PHASES if span in running), None)
        if phase is None:  # between two phases nothing runs
            phase = "loading" if running else self._last[0] or "loading"
        if (now := (phase, self._step, self._steps)) != self._last:
            self._last = now
            self._send(Now(self._id, *now))

    @property
    def seconds(self) -> dict[str, float]:
        """What each phase took, and what loading took until the first of them."""
        spent, sums = self.timings.seconds, dict[str, float]()
        for span, name in reversed(_PHASES):
            if span in spent:
                sums[name] = sums.get(name, 0.0) + spent[span]
        return sums


class Worker:
    """Makes videos.

    Args:
        send: sends a message to the server.
        pipelines: the artifacts.
    """

    def __init__(self, send: Callable[[OfWorker], None], pipelines: Pipelines) -> None:
        self._send, self._pipelines = send, pipelines
        self._tokens: dict[str, wanrun.CancelToken] = {}
        self.jobs: queue.SimpleQueue[Run] = queue.SimpleQueue()

    def take(self, message: Run | Cancel) -> None:
        """Takes a message of the server, from any thread."""
        if isinstance(message, Cancel):
            if (token := self._tokens.get(message.id)) is not None:
                token.cancel()
            return
        self._tokens[message.id] = wanrun.CancelToken()
        self.jobs.put(message)

    def run(self, job: Run) -> bool:
        """Makes the videos of a job, and says how it ended; returns whether the worker can go on."""
        failed: Failed | None = None
        try:
            self._send(self._make(job))
        except CancelledError:
            self._send(Cancelled(job.id))
        except Exception as error:
            failed = failure(job.id, error)
            if failed.code == "no_space":
                print(f"{job.id} has failed: {error}", file=sys.stderr)
            else:
                traceback.print_exception(error)
            self._send(failed)
        finally:
            self._tokens.pop(job.id, None)
        return failed is None or not failed.ends

    def _make(self, job: Run) -> Done:
        token, progress = self._tokens[job.id], Progress(job.id, self._send)
        token.check()
        timings = progress.timings
        pipeline = self._pipelines.get(job.model, timings, token)
        generation = wanrun.resolve(pipeline.artifact, **job.options)
        result = pipeline.run(generation, on_step=progress.step, timings=timings, cancel=token)
        with timings.phase("encode_video"):
            save(result, Path(job.folder), job.format)
        timings.tell = None
        return Done(
            job.id,
            plain(result.options),
            progress.seconds,
            len(timings.step_seconds),
            list(result.warnings),
        )

    def serve(self) -> int:
        """Makes the videos of all jobs that come; returns the exit code once it cannot go on."""
        while self.run(self.jobs.get()):
            pass
        return OUT_OF_MEMORY


def failure(id: str, error: Exception) -> Failed:
    """Returns what is told of a job that has failed; of an error that is not ``wanrun``'s only its kind."""
    if lacks_memory(error):
        return Failed(
            id,
            "out_of_memory",
            "the device has too little memory for this video; ask for a smaller one",
            ends=True,
        )
    if isinstance(error, NoSpaceError) or lacks_space(error):
        return Failed(id, "no_space", NO_ROOM)
    if isinstance(error, WanError):
        code = "artifact_error" if isinstance(error, ArtifactError) else "generation_error"
        return Failed(id, code, str(error))
    return Failed(id, "internal_error", f"internal error: {type(error).__name__}; see the server's log")


def save(result: Result, folder: Path, suffix: str) -> None:
    """Writes the videos, and of each a small picture and its last frame, into a folder."""
    from PIL import Image

    videos = result.save(folder / f"video.{suffix}", overwrite=True)
    for video, frames in zip(videos, result.frames, strict=True):
        small = Image.fromarray(frames[0])
        small.thumbnail((640, 640))
        small.save(video.with_name(f"{video.stem}.{THUMBNAIL}"), "WEBP", quality=80)
        Image.fromarray(frames[-1]).save(video.with_name(f"{video.stem}.{LAST_FRAME}"), "PNG")


def first_model(begin: Begin, pipelines: Pipelines) -> Pipeline | Broken:
    """Loads the first model; returns why it cannot be."""
    try:
        return pipelines.get(next(iter(begin.artifacts)))
    except WanError as error:
        return Broken(str(error), error.exit_code)
    except Exception as error:
        traceback.print_exception(error)
        what = (
            "the device has too little memory" if lacks_memory(error) else f"{type(error).__name__}: {error}"
        )
        return Broken(f"the artifact cannot be loaded: {what}", 1)


def main() -> None:
    """Runs a worker over the socket whose number is the only argument; ends with it."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the server ends its workers
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)  # before there are other threads, which take it over
    connection = socket.socket(fileno=int(sys.argv[1]))
    lines, lock = connection.makefile("rb"), threading.Lock()

    def send(message: OfWorker) -> None:
        with lock, contextlib.suppress(OSError):  # the server is gone: reading ends this process
            connection.sendall(line(message))

    begin = to_worker(lines.readline() or b"null")
    assert isinstance(begin, Begin)
    pipelines = Pipelines(begin.artifacts, begin.loading)
    worker = Worker(send, pipelines)

    def listen() -> None:
        try:
            for data in lines:
                message = to_worker(data)
                assert not isinstance(message, Begin)
                worker.take(message)
        finally:  # the server has gone, perhaps in the middle of a line: the device is to be free
            os._exit(0)

    threading.Thread(target=listen, name="listen", daemon=True).start()
    first = first_model(begin, pipelines)
    if isinstance(first, Broken):
        send(first)
        os._exit(first.exit_code)
    send(Ready())
    os._exit(worker.serve())


if __name__ == "__main__":
    main()
