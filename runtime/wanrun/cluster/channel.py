"""A connection between two processes of a run: messages, one line of JSON each."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from typing import Any, Literal

import msgspec

SEND_SECONDS = 10.0
"""Seconds after which a peer that reads nothing counts as gone."""

MAX_MESSAGE_BYTES = 2**28
"""The most bytes of a line; the largest holds the options of all prompts of a file, some kilobytes each."""


MAX_STRANGE_BYTES = 2**12
"""The most bytes that a connection may send before it has said which process it is."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message from one process to another.

    Attributes:
        kind: ``hello`` introduces a process; ``beat`` says that it runs; ``say`` brings its value of an
            exchange to process 0, and ``all`` everybody's values back; ``failed`` says which process has
            ended the run, and why.
        process: the process that the message is about.
        number: the exchange's number; in ``hello`` the number of processes.
        value: the value that is exchanged.
        text: why the run ends.
        last: whether the exchange is the last one, after which a process may go.
    """

    kind: Literal["hello", "beat", "say", "all", "failed"]
    process: int = 0
    number: int = 0
    value: Any = None
    text: str = ""
    last: bool = False


class Channel:
    """One end of a connection. Any thread may send; one thread receives.

    Args:
        proof: what the peer has to send before anything else is looked at.

    Attributes:
        limit: the bytes of the largest message that is taken.
    """

    limit = MAX_MESSAGE_BYTES

    def __init__(self, connection: socket.socket, proof: bytes = b"") -> None:
        connection.settimeout(SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._sending = connection, threading.Lock()
        self._received, self._proof = bytearray(), proof

    def fileno(self) -> int:
        """The descriptor, for a selector; -1 once closed."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends a message. Raises OSError if the peer is gone."""
        self.send_bytes(msgspec.json.encode(message) + b"\n")

    def send_bytes(self, data: bytes) -> None:
        """Sends a proof, or an encoded message. Raises OSError if the peer is gone."""
        with self._sending:
            self._socket.sendall(data)

    def receive(self) -> list[Message]:
        """Returns the messages that have come in whole; called when there is something to read.

        Raises:
            OSError: if the peer is gone, or is no process of a run; PermissionError if its proof is wrong.
        """
        data = self._socket.recv(2**16)
        if not data:
            raise ConnectionError("closed")
        self._received += data
        if len(self._received) > self.limit:
            raise ConnectionError("no message")
        if self._proof:
            given = bytes(self._received[: len(self._proof)])
            if len(given) < len(self._proof):
                return []
            if not hmac.compare_digest(given, self._proof):
                raise PermissionError("another proof")
            del self._received[: len(given)]
            self._proof, data = b"", bytes(self._received)
        *lines, rest = self._received.split(b"\n") if b"\n" in data else [self._received]
        self._received = bytearray(rest)
        try:
            return [msgspec.json.decode(line, type=Message) for line in lines]
        except Exception as error:  # no JSON, no UTF-8, or nested too deep: not one of us
            raise ConnectionError("no message") from error

    def finish(self) -> None:
        """Ends sending: the peer reads the messages that were sent, and then the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()
