"""Messages between processes: whole ones, in order, whatever pieces they come in."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from wanrun.cluster.channel import Channel, Message


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            yield near, far


@pytest.fixture
def ends(sockets: tuple[socket.socket, socket.socket]) -> tuple[Channel, socket.socket]:
    """A channel, and the socket at its other end."""
    near, far = sockets
    return Channel(near), far


def test_messages_come_as_they_were_sent(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    sent = [Message("say", 1, 2, {"a": [1, "\n", None]}, last=True), Message("failed", 3, text="no\tair")]
    other = Channel(far)
    for message in sent:
        other.send(message)
    received: list[Message] = []
    while len(received) < len(sent):
        received += channel.receive()
    assert received == sent


def test_pieces_of_a_message(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    far.sendall(b'{"kind":"be')
    assert channel.receive() == []
    far.sendall(b'at","process":4}\n{"kind"')
    assert channel.receive() == [Message("beat", 4)]


@pytest.mark.parametrize(
    "said",
    [
        *(b"GET / HTTP/1.1\n", b'{"kind":"other"}\n', b"\xff\n", b"x" * 5000),
        *(b'{"kind":"say","text":"\xff"}\n', b'{"kind":"say","value":"\xc3("}\n', b"[" * 1500 + b"\n"),
        *(b'{"kind":"say","value":' + b"[" * 1500 + b"\n", b'{"kind":"hello","number":1e999}\n', b"\0\n"),
    ],
)
def test_what_is_no_message(ends: tuple[Channel, socket.socket], said: bytes) -> None:
    channel, far = ends
    channel.limit = 4096
    far.sendall(said)
    with pytest.raises(ConnectionError, match="no message"):
        for _ in range(3):
            channel.receive()


PROOF = b"0123456789abcdef"


@pytest.fixture
def guarded(sockets: tuple[socket.socket, socket.socket]) -> tuple[Channel, socket.socket]:
    """A channel that asks for the proof, and the socket at its other end."""
    near, far = sockets
    return Channel(near, PROOF), far


def test_nothing_is_looked_at_before_the_proof(guarded: tuple[Channel, socket.socket]) -> None:
    channel, far = guarded
    far.sendall(PROOF[:5])
    assert channel.receive() == []
    far.sendall(PROOF[5:] + b'{"kind":"beat","process":4}\n{"ki')
    assert channel.receive() == [Message("beat", 4)]
    far.sendall(b'nd":"beat"}\n')
    assert channel.receive() == [Message("beat")]


@pytest.mark.parametrize("said", [b'{"kind":"beat","process":4}\n', b"\n" * 16, PROOF[:-1] + b"\n" + PROOF])
def test_another_proof(guarded: tuple[Channel, socket.socket], said: bytes) -> None:
    channel, far = guarded
    far.sendall(said)
    with pytest.raises(PermissionError):
        channel.receive()


def test_the_end(ends: tuple[Channel, socket.socket]) -> None:
    """What was sent before is read first."""
    channel, far = ends
    other = Channel(far)
    other.send(Message("beat", 1))
    other.finish()
    assert channel.receive() == [Message("beat", 1)]
    with pytest.raises(ConnectionError, match="closed"):
        channel.receive()
    channel.close()
    assert channel.fileno() == -1
