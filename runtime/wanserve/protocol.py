"""uvicorn's protocol, with a limit for how long the header of a request may take."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

TRANSPORT: Final = "transport"
"""The name of the connection among what a request has."""


class BoundedProtocol(H11Protocol):
    """A protocol that closes a connection if a request's header, or its end after the answer, is late.

    It also closes one whose client does not read. Each may take ``timeout_header`` seconds. uvicorn only
    limits the time between two requests.
    """

    timeout_header = 30.0
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, TRANSPORT: transport}  # as the state of its requests
        if self.limit_concurrency is not None and len(self.connections) > 1.1 * self.limit_concurrency:
            transport.abort()  # those up to here are answered with 503, if they ask
        self._wait_for_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_header()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_header()

    def pause_writing(self) -> None:
        super().pause_writing()  # type: ignore[no-untyped-call]
        self._unread = self.loop.call_later(self.timeout_header, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()  # type: ignore[no-untyped-call]
        self._stop_timers("_unread")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers("_deadline", "_unread")
        super().connection_lost(exc)

    def _stop_timers(self, *names: str) -> None:
        for name in names:
            if (timer := getattr(self, name)) is not None:
                timer.cancel()
                setattr(self, name, None)

    def _wait_for_header(self) -> None:
        """Arms the timer only while bytes of a header are due."""
        waits = self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE
        if not waits:
            self._stop_timers("_deadline")
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.timeout_header, self._too_slow)

    def _too_slow(self) -> None:
        if self.conn.our_state is not h11.IDLE or self.conn.their_state is not h11.IDLE:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.send_400_response("The request came too slowly.")
