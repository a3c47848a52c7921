"""A server of live videos in the test's process, whose worker is a thread that makes colours."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.asked import catalog, in_chunks
from serve_client import Connection
from wanrun import Generation, Timings
from wanserve import live_worker
from wanserve.keys import Keys
from wanserve.messages import Begin, Ready, line, to_worker
from wanserve.service import Service
from wanserve.settings import Settings
from wanserve.worker import Worker

FRAMES = 4
"""Of a chunk; the first one has one frame."""

TYPE = 'video/mp4; codecs="toy"'
HEAD = struct.pack(">I4s", 8, b"ftyp") + struct.pack(">I4s", 12, b"moov") + b"head"


class Chunk(SimpleNamespace):
    """A chunk as ``Pipeline.run_live`` yields it."""


class Colours:
    """A pipeline whose chunks depend on seed, prompt and number.

    Attributes:
        made: numbers of the chunks, in the order in which they were made.
        seconds: of a chunk.
        nbytes: of a fragment.
        fails: raised instead of the chunk of a number.
    """

    def __init__(self) -> None:
        self.made, self.seconds, self.fails = list[int](), 0.0, dict[int, BaseException]()
        self.nbytes = 1024
        self.manifest, self.artifact = (
            in_chunks(catalog().models["text"]).manifest,
            SimpleNamespace(influences={}, built_here=lambda profile: {}),
        )

    @contextlib.contextmanager
    def run_live(
        self, generation: Generation, inputs: Any, max_frames: int | None, cancel: Any
    ) -> Iterator[_Live]:
        options = generation.options
        yield _Live(self, options["prompt"], options["seed"], max_frames, cancel)

    def close(self) -> None:
        pass


class _Live:
    def __init__(self, colours: Colours, prompt: str, seed: int, frames: int | None, cancel: Any) -> None:
        self._colours, self._prompt, self._seed, self._cancel = colours, prompt, seed, cancel
        self._frames, self._number = frames, 0

    def __next__(self) -> Chunk:
        number = self._number
        first = 0 if number == 0 else 1 + FRAMES * (number - 1)
        if self._frames is not None and first >= self._frames:
            raise StopIteration
        began, timings = time.perf_counter(), Timings.from_now()
        with timings.phase("denoise"):
            time.sleep(self._colours.seconds)
        self._cancel.check()
        if (error := self._colours.fails.get(number)) is not None:
            raise error
        self._colours.made.append(number)
        self._number += 1
        colour = _colour(self._seed, self._prompt, number)
        frames = np.full((1, FRAMES if number else 1, 64, 96, 3), colour, np.uint8)
        return Chunk(
            number=number,
            first=first,
            frames=frames,
            latents=np.zeros(1, np.float32),
            prompt=self._prompt,
            seconds=time.perf_counter() - began,
            timings=timings,
        )

    def send(self, prompt: str) -> None:
        self._prompt = prompt


def part_of(colours: Colours, number: int, prompt: str = "a fox", seed: int = 0) -> bytes:
    """The fragment of a chunk: its colour and its frames, again and again."""
    frames = FRAMES if number else 1
    return bytes([_colour(seed, prompt, number), frames]) * (colours.nbytes // 2)


def _colour(seed: int, prompt: str, number: int) -> int:
    return zlib.crc32(f"{seed} {prompt} {number}".encode()) % 256


@contextlib.contextmanager
def plain_video(colours: Colours, sink: Callable[[bytes], object], *_: Any) -> Iterator[Any]:
    """What ``live_video`` is, without ffmpeg."""
    first = [HEAD]

    def write(frames: np.ndarray) -> None:
        for head in first:
            sink(head)
        first.clear()
        sink(bytes([int(frames.flat[0]), len(frames)]) * (colours.nbytes // 2))

    yield SimpleNamespace(write=write)


class ThreadWorker:
    """What a process of a worker is for a device, with a thread instead."""

    def __init__(self, colours: Colours) -> None:
        self.socket, self._theirs = socket.socketpair()
        self._code, self.pid = 0, 0
        self._worker = Worker(self._send, SimpleNamespace(get=lambda *_: colours, loaded=["text"]))  # type: ignore[arg-type]
        self._ended = threading.Event()
        for run in (self._listen, self._serve):
            threading.Thread(target=run, daemon=True).start()

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):
            self._theirs.sendall(line(message))

    def _serve(self) -> None:
        code = self._worker.serve()
        if not self._ended.is_set():
            self._end(code)

    def _listen(self) -> None:
        self._send(Ready(["text"]))
        with self._theirs, self._theirs.makefile("rb") as lines:
            for data in lines:
                message = to_worker(data)
                assert not isinstance(message, Begin)
                self._worker.take(message)
        for token in (*self._worker._tokens.values(),):
            token.cancel()
        self._worker.jobs.put(None)
        self._ended.set()

    def wait(self) -> int:
        self._ended.wait()
        return self._code

    def kill(self) -> None:
        """Ends it as SIGKILL does: it says nothing more."""
        self._end(-9)

    def _end(self, code: int) -> None:
        self._code = code
        with contextlib.suppress(OSError):
            self._theirs.shutdown(socket.SHUT_RDWR)


class House:
    """A server of live videos, and what asks it.

    Args:
        service: the server.
        colours: what its worker makes.
    """

    def __init__(self, service: Service, colours: Colours) -> None:
        self.service, self.colours = service, colours
        self.workers, self._writers = list[ThreadWorker](), list[asyncio.StreamWriter]()
        self.host, self.port = service.socket.getsockname()[:2]

    def started(self) -> ThreadWorker:
        self.workers.append(ThreadWorker(self.colours))
        return self.workers[-1]

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """Sends a request over a connection of its own."""
        connection = Connection(self.host, self.port)
        answer = await connection.call(method, path, body, headers)
        connection.close()
        return answer

    async def ask(self, **fields: Any) -> str:
        """Asks for a live video, and returns its id."""
        body = {"prompt": "a fox", "model": "text", "live": True, **fields}
        answer = await self.call("POST", "/v1/videos", body)
        assert answer.status == 200, answer.body
        return str(answer.json["id"])

    async def look(self, id: str) -> dict[str, Any]:
        return dict((await self.call("GET", f"/v1/videos/{id}")).json)

    async def ended(self, id: str) -> dict[str, Any]:
        """Returns a job once it has ended."""
        return await self.until(id, lambda job: job["status"] not in ("queued", "in_progress"))

    async def until(self, id: str, check: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Returns a job once it is as it is to be."""
        async with asyncio.timeout(5):
            while not check(job := await self.look(id)):
                await asyncio.sleep(0.01)
        return job

    async def content(self, id: str, variant: str = "video") -> bytes:
        answer = await self.call("GET", f"/v1/videos/{id}/content?variant={variant}")
        assert answer.status == 200, answer.body
        return bytes(answer.body)

    def whole(self, chunks: int, seed: int = 0, prompt: str = "a fox") -> bytes:
        """The file of the first chunks."""
        return HEAD + b"".join(part_of(self.colours, number, prompt, seed) for number in range(chunks))

    async def read(self, id: str, query: str = "") -> Reading:
        """Begins to read a live video; little of it waits on this side."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 12)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        self._writers.append(writer)
        writer.write(f"GET /v1/videos/{id}/live{query} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        return Reading(reader, writer)

    async def play(self, id: str) -> bytes:
        """Reads a live video up to its end."""
        return await (await (await self.read(id)).begin()).rest()

    def close(self) -> None:
        """Closes what reads."""
        for writer in self._writers:
            writer.close()


class Reading:
    """An answer that goes on, read as it comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self.status, self.headers = reader, writer, 0, ""

    async def begin(self) -> Reading:
        """Reads the header, which comes with the first fragment."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        self.status, self.headers = int(head.split()[1]), head.lower()
        return self

    async def part(self) -> bytes:
        """Returns the next part as it was sent; empty at the end."""
        if not (size := int(await self._reader.readuntil(b"\r\n"), 16)):
            return b""
        return (await self._reader.readexactly(size + 2))[:-2]

    async def rest(self) -> bytes:
        """Returns the parts up to the end."""
        return b"".join([part async for part in self.parts()])

    async def parts(self) -> AsyncIterator[bytes]:
        while part := await self.part():
            yield part

    def leave(self) -> None:
        self._writer.close()


@asynccontextmanager
async def house(
    folder: Path, monkeypatch: pytest.MonkeyPatch, encodes: bool = False, **settings: Any
) -> AsyncIterator[House]:
    """Runs a server while the block runs; ``encodes`` says whether its videos are H.264."""
    colours = Colours()
    if not encodes:
        monkeypatch.setattr(live_worker, "live_video", partial(plain_video, colours))
        monkeypatch.setattr(live_worker, "mime_type", lambda head: TYPE)
    service = Service(Settings({}, folder, port=0, grace_seconds=0.0, **settings), Keys())
    service.catalog.models |= {name: in_chunks(model) for name, model in catalog().models.items()}
    there = House(service, colours)
    service.devices[:] = service.devices[:1]
    service.devices[0]._start = there.started  # type: ignore[assignment]
    serving = asyncio.create_task(service.run(lambda line: None))
    try:
        yield there
    finally:
        there.close()
        service._end.set()
        await serving


@contextmanager
def house_beside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    """Runs a server whose videos are H.264 in a thread while the block runs."""
    monkeypatch.setattr(Service, "_take_signals", lambda self: None)
    opened = SimpleQueue[tuple[House, asyncio.AbstractEventLoop, asyncio.Event]]()

    async def serve() -> None:
        async with house(folder, monkeypatch, encodes=True) as there:
            opened.put((there, asyncio.get_running_loop(), end := asyncio.Event()))
            await end.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    there, loop, end = opened.get(timeout=20)
    try:
        yield there
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
