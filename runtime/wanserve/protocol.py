"""uvicorn's protocol, with a limit for how long the header of a request may take."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedProtocol(H11Protocol):
    """Closes a connection whose request's header does not come within ``timeout_header`` seconds.

    uvicorn only limits the time between two requests.
    """

    timeout_header = 30.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_header()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_header()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _wait_for_header(self) -> None:
        """Sets the deadline while a header is expected, and takes it away once it has come."""
        waits = self.conn.their_state is h11.IDLE
        if waits and self._deadline is None:
            self._deadline = self.loop.call_later(self.timeout_header, self._too_slow)
        elif not waits and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self.send_400_response("The request came too slowly.")
