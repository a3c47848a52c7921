"""Publishes every change of a video to server-sent events, and to requests that wait for its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from wanserve.video import ENDED

HEARTBEAT_SECONDS: Final = 15.0
"""After so long without an event a comment is sent: proxies close connections that are silent."""

MAX_BEHIND: Final = 500
"""Events that may wait for a slow listener; then its stream ends, and it may come again."""


@dataclass(eq=False)
class Listener:
    """One who listens to an owner's videos (None for those of all), or only to the video ``id``."""

    owner: str | None
    id: str | None
    _waiting: asyncio.Queue[tuple[str, Any]] = field(default_factory=lambda: asyncio.Queue(MAX_BEHIND))
    _lost: bool = False
    _moved: tuple[str, Any] | None = None

    def hears(self, owner: str, id: str) -> bool:
        """Whether a video of an owner is among those that are listened to."""
        return self.owner in (None, owner) and self.id in (None, id)

    def put(self, name: str, data: Any) -> None:
        """Adds an event; one too many ends the listening, since a change would be missing."""
        if self._lost:
            return
        if self._waiting.full():
            self._lost = True
            while not self._waiting.empty():
                self._waiting.get_nowait()
            name, data = "closed", {}
        self._waiting.put_nowait((name, data))

    def moved(self, name: str, data: Any) -> None:
        """Adds an event of the line, in the place of the one before if that still waits."""
        waits, self._moved = self._moved is not None, (name, data)
        if not waits:
            self.put("", {})  # its place among the others

    async def next(self, seconds: float | None = None) -> tuple[str, Any] | None:
        """Returns the next event; None after so many seconds without one."""
        try:
            async with asyncio.timeout(seconds):
                event = await self._waiting.get()
        except TimeoutError:
            return None
        if event[0] == "" and self._moved is not None:
            event, self._moved = self._moved, None
        return event


class Publisher:
    """All who listen."""

    def __init__(self) -> None:
        self._listeners = set[Listener]()
        self._ends = dict[str, asyncio.Future[None]]()
        self.closed = False

    @property
    def wanted(self) -> bool:
        """Whether there is a listener."""
        return bool(self._listeners)

    def hears(self, owner: str, id: str) -> bool:
        """Whether a video has a listener."""
        return any(listener.hears(owner, id) for listener in self._listeners)

    def listen(self, owner: str | None, id: str | None = None) -> Listener:
        """Adds a listener, which ``leave`` takes away."""
        listener = Listener(owner, id)
        self._listeners.add(listener)
        if self.closed:
            listener.put("closed", {})
        return listener

    def leave(self, listener: Listener) -> None:
        """Takes a listener away."""
        self._listeners.discard(listener)

    def end(self, id: str) -> asyncio.Future[None]:
        """Returns what is done once there is nothing to wait for.

        A video that goes on has ended, is forgotten, or waits for the next start of the server; or that ends.
        """
        end = self._ends.setdefault(id, asyncio.get_running_loop().create_future())
        if self.closed:
            self.ended(id)
        return end

    def ended(self, id: str) -> None:
        """Wakes the requests that wait for the end of a video."""
        if (end := self._ends.pop(id, None)) is not None:
            end.set_result(None)

    def publish(self, owner: str, id: str, name: str, data: Any) -> None:
        """Publishes an event of a video to its listeners."""
        for listener in self._listeners:
            if listener.hears(owner, id):
                listener.put(name, data)

    def moved(self, line: Callable[[str | None], Any], one: Callable[[str], Any]) -> None:
        """Publishes to all listeners that places in the line have changed.

        ``line`` returns the line as the owner sees it; ``one`` returns a video, None if it does not wait.
        """
        lines = dict[str | None, Any]()
        for listener in self._listeners:
            if listener.id is None:
                if listener.owner not in lines:
                    lines[listener.owner] = line(listener.owner)
                listener.moved("queue", lines[listener.owner])
            elif (data := one(listener.id)) is not None:
                listener.moved("video", data)

    def close(self) -> None:
        """Ends every stream: the server ends."""
        self.closed = True
        for listener in self._listeners:
            listener.put("closed", {})
        for id in list(self._ends):
            self.ended(id)


async def stream(
    hub: Publisher, owner: str | None, id: str | None = None, now: Callable[[], Any] = dict
) -> AsyncIterator[bytes]:
    """Yields the events of an owner's videos as text/event-stream; None for those of all.

    With the ``id`` of a video the stream begins with ``now()``, that video as it is now, and ends with its
    end.
    """
    listener, number = hub.listen(owner, id), 0
    try:
        yield b"retry: 1000\n\n"
        event: tuple[str, Any] | None = None if id is None else ("video", now())
        while True:
            if event is None:
                event = await listener.next(HEARTBEAT_SECONDS)
            if event is None:
                yield b": still here\n\n"
                continue
            name, data = event
            if name == "closed":
                return
            number += 1
            named = _name(data) if id is not None and name == "video" else name
            yield b"id: %d\nevent: %s\ndata: %s\n\n" % (number, named.encode(), msgspec.json.encode(data))
            if id is not None and (name == "deleted" or data.status in ENDED):
                return
            event = None
    finally:
        hub.leave(listener)


def _name(video: Any) -> str:
    """The name of an event of one video: its phase while it waits or runs, else its state."""
    return str(video.status if video.status in ENDED else video.phase)
