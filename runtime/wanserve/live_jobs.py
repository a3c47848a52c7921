"""Live videos on the server: the fragments that are there, who reads them, and how far a worker may go.

A worker writes each chunk as a file that can be played, and readers get the files one after the other, so no
frame waits in memory. A worker makes at most ``AHEAD`` chunks more than the reader that is furthest has
taken: a single reader decides the pace, and a slow one among others does not hold them up. It reads what is
on disk, and is taken to the newest fragment when its next one is not kept any more. A reader that plays is
given no more than it plays: what the system and a browser hold for it may be minutes of a small video.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from wanserve.folders import Folders
from wanserve.live_files import Piece
from wanserve.log import LOG
from wanserve.messages import Cancel, Fragment, Go, Steer
from wanserve.metrics import Metrics
from wanserve.settings import Settings
from wanserve.video import Steered, Stopped, Video

AHEAD: Final = 2
"""Chunks that a worker may make before the furthest reader has taken them."""

LEAD_SECONDS: Final = 0.5
"""Of a video that a reader that plays is given before it has played them."""

PROMPTS: Final = 20
"""The newest prompts of a live video that are kept: each may have 100 000 characters."""

Stop = Callable[[Video, Stopped], Awaitable[None]]
Tell = Callable[[Go | Steer | Cancel], object]


@dataclass(eq=False)
class LiveReader:
    """A reader of a live video; ``next`` is the number of its next fragment.

    One that plays the video gets no more than it plays; ``played`` is when it will have played what it was
    given, by the loop's clock.
    """

    next: int
    plays: bool = False
    played: float = 0.0


@dataclass(frozen=True)
class Kept:
    """A fragment that is kept: ``before`` are the bytes of all that were made before it."""

    piece: Piece
    before: int
    nbytes: int


class LiveJob:
    """A live video until it has ended.

    It waits ``wait_seconds`` for a reader, and ``stop`` ends it. ``made`` counts the fragments that its
    worker has reported; ``runs`` says whether a worker has it.
    """

    def __init__(self, video: Video, folders: Folders, wait_seconds: float, stop: Stop) -> None:
        assert video.live is not None
        self.video, self._live = video, video.live
        self._wait_seconds, self._stop = wait_seconds, stop
        self._files = folders.live(video)
        self._kept, self._bytes, self.made = deque[Kept](), 0, 0
        self._readers, self._changed, self._over = set[LiveReader](), asyncio.Event(), False
        self._tell: Tell = lambda message: None
        self.runs = False
        self._timers = dict[str, asyncio.Task[None]]()
        self._chunks, self._prompt = AHEAD, None  # type: int, str | None

    # What its worker does.

    def begin(self, tell: Tell) -> None:
        """Lets a worker go on; ``tell`` sends it a message."""
        self._tell = tell
        tell(Go(self.video.id, self._chunks))
        if self._prompt is not None:
            tell(Steer(self.video.id, self._prompt))
        self.runs = True

    def take(self, fragment: Fragment) -> None:
        """Takes a fragment that is there, and drops the oldest if more than the limit is kept."""
        live = self._live
        live.made, live.media_type = fragment.first + fragment.frames, fragment.media_type
        if not live.prompts or live.prompts[-1].prompt != fragment.prompt:
            live.prompts = [*live.prompts, Steered(fragment.first, fragment.prompt)][-PROMPTS:]
        if live.first_seconds is None:
            live.first_seconds = round(time.time() - self.video.created, 3)
        piece = Piece(fragment.number, fragment.first, fragment.frames)
        self._kept.append(Kept(piece, self._bytes, fragment.nbytes))
        self.made, self._bytes = fragment.number + 1, self._bytes + fragment.nbytes
        while self._bytes - self._kept[0].before > live.bytes and len(self._kept) > 1:
            piece = self._kept.popleft().piece
            self._files.drop(piece)
            live.dropped = piece.first + piece.frames
        if fragment.number == 0:
            self._arm("limit", live.seconds + self._wait_seconds)
            self._watch()
        self._wake()

    def steer(self, prompt: str) -> None:
        """Changes the prompt from the next chunk on."""
        self._prompt = prompt
        self._tell(Steer(self.video.id, prompt))

    async def close(self) -> None:
        """Ends it, as the server ends; one of which nothing is made waits for the next start."""
        if self.made:
            await self._stop(self.video, "server")
        else:
            self.video.stopped_by("server")
            self._tell(Cancel(self.video.id))

    def again(self) -> bool:
        """Says that it waits again, by its newest prompt; returns whether that is another one."""
        self.rest()
        steered, self._prompt, self._live.stopped = self._prompt, None, None
        if steered is not None:
            self.video.options = {**self.video.options, "prompt": steered}
        return steered is not None

    def rest(self) -> None:
        """Says that no worker has it any more."""
        self._tell, self.runs = lambda message: None, False
        while self._timers:
            self._timers.popitem()[1].cancel()

    def end(self) -> None:
        """Says that no fragment comes any more."""
        self.rest()
        self._over = True
        self._wake()

    # Who reads it.

    def join(self, plays: bool = False) -> LiveReader:
        """Adds a reader: from the beginning if all is kept and it does not play, else from the newest."""
        whole = self._live.dropped == 0 and not plays
        reader = LiveReader(0 if whole else max(self.made - 1, 0), plays)
        self._readers.add(reader)
        if (timer := self._timers.pop("no_reader", None)) is not None:
            timer.cancel()
        return reader

    def leave(self, reader: LiveReader) -> None:
        """Takes a reader away; without any the video ends after a while."""
        self._readers.discard(reader)
        self._watch()

    async def begun(self) -> bool:
        """Waits for the first fragment; returns whether one came."""
        return await self._there(0)

    async def read(self, reader: LiveReader) -> AsyncIterator[bytes]:
        """Yields the initialization segment, and the fragments as they come."""
        with suppress(OSError):  # the video was removed
            yield await asyncio.to_thread(self._files.head)
            while await self._there(reader.next):
                piece, data = await self._fragment(reader)
                yield data
                await self._play(reader, piece.frames / self.video.shape["fps"])
                reader.next += 1
                self._go(reader)

    async def _play(self, reader: LiveReader, seconds: float) -> None:
        """Waits until one that plays has little left of what it was given."""
        now = asyncio.get_running_loop().time()
        reader.played = max(reader.played, now) + seconds
        if reader.plays and not self._over:
            await asyncio.sleep(reader.played - now - LEAD_SECONDS)

    async def _fragment(self, reader: LiveReader) -> tuple[Piece, bytes]:
        """Returns a reader's next fragment, or the newest if that is not kept; raises OSError if none is."""
        while True:
            if reader.next < self._kept[0].piece.number:
                reader.next = self.made - 1
            kept = self._kept[reader.next - self._kept[0].piece.number]
            with suppress(FileNotFoundError):
                return kept.piece, await asyncio.to_thread(self._files.read, kept.piece)
            if reader.next >= self._kept[0].piece.number:  # it was not dropped: all are one file now
                before = kept.before - self._kept[0].before
                return kept.piece, await asyncio.to_thread(self._files.part, before, kept.nbytes)

    async def _there(self, number: int) -> bool:
        while number >= self.made and not self._over:
            await self._changed.wait()
        return number < self.made

    def _go(self, reader: LiveReader) -> None:
        """Lets the worker go on as far as a reader allows."""
        if (chunks := reader.next + AHEAD) > self._chunks:
            self._chunks = chunks
            self._tell(Go(self.video.id, chunks))

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _watch(self) -> None:
        """Ends it after a while if a worker has it, a part of it is made, and nobody reads."""
        if self.runs and self.made and not self._readers:
            self._arm("no_reader", self._wait_seconds)

    def _arm(self, why: Stopped, seconds: float) -> None:
        async def stop() -> None:
            await asyncio.sleep(seconds)
            if self.runs:
                await self._stop(self.video, why)

        if (before := self._timers.get(why)) is not None:
            before.cancel()
        self._timers[why] = asyncio.create_task(stop())


class LiveJobs:
    """The live videos that have not ended; ``stop`` ends one."""

    def __init__(self, settings: Settings, folders: Folders, metrics: Metrics, stop: Stop) -> None:
        self._settings, self._folders, self._metrics, self._stop = settings, folders, metrics, stop
        self._here = dict[str, LiveJob]()

    def of(self, video: Video) -> LiveJob:
        """Returns a live video that has not ended."""
        if (one := self._here.get(video.id)) is None:
            one = LiveJob(video, self._folders, self._settings.live_wait_seconds, self._stop)
            self._here[video.id] = one
        return one

    def begin(self, video: Video, tell: Tell) -> None:
        """Lets the worker that has a video go on, if it is live."""
        if video.live is not None:
            self.of(video).begin(tell)

    def again(self, video: Video) -> bool:
        """Says that a video waits again; returns whether that is by another prompt."""
        return (one := self._here.get(video.id)) is not None and one.again()

    def take(self, fragment: Fragment) -> Video | None:
        """Takes a fragment that is there, and returns its video; None if that has ended."""
        if (one := self._here.get(fragment.id)) is None:
            return None
        one.take(fragment)
        live, playing = one.video.live, fragment.frames / one.video.shape["fps"]
        assert live is not None
        late = fragment.number > 0 and fragment.seconds > playing
        live.late += late
        self._metrics.chunk(
            fragment.frames, fragment.seconds, late, live.first_seconds if fragment.number == 0 else None
        )
        return one.video

    async def close(self) -> None:
        """Ends those that workers have: the server ends."""
        with suppress(sqlite3.Error):
            await asyncio.gather(*(one.close() for one in self._here.values() if one.runs))

    async def join(self, video: Video) -> None:
        """Makes one file of the kept fragments of a live video that ends; it is not stopped any more."""
        if (live := video.live) is None:
            return
        if (one := self._here.get(video.id)) is not None:
            one.rest()
        if live.made >= live.seconds * video.shape["fps"]:
            video.stopped_by("limit")
        try:
            await asyncio.to_thread(self._folders.live(video).join, live.made)
        except OSError as error:  # a full disk: the fragments stay, and this is tried again
            LOG.error("%s is not one file yet: %s", video.id, error)

    def end(self, video: Video) -> None:
        """Says that a video has ended."""
        if (one := self._here.pop(video.id, None)) is not None:
            one.end()
