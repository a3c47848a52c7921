"""The process that has a device: it loads artifacts and makes the videos of jobs in a line.

A job begins while the videos of the one before are decoded and written: see ``wanrun.job.line``. A crash of
XLA ends only this process. The server starts another one.
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
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import wanrun
from wanrun import Outcome, Progress
from wanrun.errors import CancelledError, NoSpaceError, UsageError, WanError, lacks_space
from wanrun.generation.video_parts import remove_spool, spool_of
from wanrun.job.line import Passed, in_line
from wanrun.job.previews import Previews
from wanserve.messages import (
    Begin,
    Broken,
    Cancel,
    ChangedError,
    Go,
    InternalError,
    Look,
    Make,
    OfWorker,
    OutOfMemoryError,
    Preview,
    Ready,
    Steer,
    line,
    to_worker,
)
from wanserve.pipelines import Pipelines, lacks_memory
from wanserve.progress import moving

if TYPE_CHECKING:
    import numpy as np

    from wanrun import Pipeline
    from wanserve.live_worker import LiveChunks

OUT_OF_MEMORY: Final = 12
"""Exit code of a worker that ends because a job has taken the memory."""

NICE: Final = 5
"""The server answers before the worker computes, where both need the CPU."""


class Worker:
    """Runs the jobs of a device, and sends messages about them to the server."""

    def __init__(self, send: Callable[[OfWorker], None], pipelines: Pipelines) -> None:
        self._send, self._pipelines = send, pipelines
        self._tokens: dict[str, wanrun.CancelToken] = {}
        self._previews: dict[str, Previews] = {}
        self._live: dict[str, LiveChunks] = {}
        self.jobs: queue.SimpleQueue[Make | None] = queue.SimpleQueue()

    def take(self, message: Make | Cancel | Look | Go | Steer) -> None:
        """Queues a job, cancels one, has a preview made of one, or lets a live one go on; from any thread."""
        match message:
            case Look():
                if (previews := self._previews.get(message.id)) is not None:
                    previews.look()
            case Cancel():
                if (token := self._tokens.get(message.id)) is not None:
                    token.cancel()
            case Go() | Steer():
                if (live := self._live.get(message.id)) is not None:
                    live.take(message)
            case Make():
                self._tokens[message.job.id] = wanrun.CancelToken()
                self._previews[message.job.id] = Previews(partial(self._preview, message.job.id))
                if message.live is not None:
                    from wanserve.live_worker import (
                        LiveChunks,  # with an encoder, which most workers do not need
                    )

                    self._live[message.job.id] = LiveChunks(message.live, self._send)
                self.jobs.put(message)

    def _preview(self, id: str, done: int, frames: np.ndarray) -> None:
        self._send(Preview(id, done, moving(frames)))

    def serve(self) -> int:
        """Runs the jobs that come, until one has taken the memory; returns the exit code.

        What runs beside that job ends first.
        """
        for _ in in_line(self._coming()):
            pass
        return OUT_OF_MEMORY

    def _coming(self) -> Iterator[Callable[[Passed], None]]:
        while (message := self.jobs.get()) is not None:
            yield partial(self.run, message)

    def run(self, message: Make, passed: Passed) -> None:
        """Runs a job, and says how it ended; none comes after one that has taken the memory."""
        progress, error = Progress(message.job.id, self._send), None  # type: Progress, Exception | None
        try:
            outcome = self._run(message, progress, passed)
            error = outcome.error
        except Exception as raised:
            error = raised
        if error is not None:
            outcome = progress.outcome(told(error))
        self._tokens.pop(message.job.id, None)
        self._previews.pop(message.job.id, None)
        self._live.pop(message.job.id, None)
        self._send(outcome)
        if isinstance(outcome.error, OutOfMemoryError):
            self.jobs.put(None)

    def _run(self, message: Make, progress: Progress, passed: Passed) -> Outcome:
        """Loads the artifact of a job, which its events and times show too, and runs it."""
        token = self._tokens[message.job.id]
        token.check()
        try:
            pipeline = self._pipelines.get(message.model, progress.timings, token)
        finally:  # others may have been released for it
            self._send(Ready(self._pipelines.loaded))
        job = message.job.unpack(pipeline.manifest)
        if (live := self._live.get(job.id)) is not None:
            return live.run(pipeline, job, progress, token)
        look, spool = self._previews[message.job.id].step, spool_of(job.outputs[0].path)
        given: dict[str, Any] = {"look": look, "spool": spool, "passed": passed}
        try:
            return wanrun.run_job(pipeline, job, progress, cancel=token, overwrite=True, **given)
        finally:  # what is left by the death of this process is continued
            remove_spool(spool)


def told(error: Exception) -> WanError:
    """Returns the error that the server gets for one that ended a job.

    Of an error that is not ``wanrun``'s the server gets only the kind; its traceback is printed.
    """
    if isinstance(error, CancelledError | ChangedError):
        return error
    if lacks_memory(error):
        traceback.print_exception(error)
        what = "the device has too little memory for this video"
        return OutOfMemoryError("out_of_memory", what, remedy="ask for a smaller one")
    if isinstance(error, UsageError) or lacks_space(error):  # what a client has sent, or a full disk
        return error if isinstance(error, UsageError) else NoSpaceError("no_space", str(error))
    traceback.print_exception(error)
    if isinstance(error, WanError):
        return error
    return InternalError(
        "internal_error", f"internal error: {type(error).__name__}", remedy="see the server's log"
    )


def first_model(begin: Begin, pipelines: Pipelines) -> Pipeline | Broken:
    """Loads the first model; returns why it cannot be."""
    try:
        return pipelines.get(next(iter(begin.artifacts)))
    except WanError as error:
        return Broken(error)
    except Exception as error:
        traceback.print_exception(error)
        what = (
            "the device has too little memory" if lacks_memory(error) else f"{type(error).__name__}: {error}"
        )
        return Broken(WanError("failed", f"the artifact cannot be loaded: {what}"))


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
        os._exit(first.error.exit_code)
    send(Ready(pipelines.loaded))
    from PIL import Image  # takes time to import, and no job is begun before

    Image.MAX_IMAGE_PIXELS = begin.max_pixels  # decoders take it over
    os._exit(worker.serve())


if __name__ == "__main__":
    main()
