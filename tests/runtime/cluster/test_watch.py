"""What a process learns of the others. How it ends with them is in test_group.py."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from wanrun.cluster import watch as watching
from wanrun.cluster.channel import Channel, Message
from wanrun.cluster.watch import Watch


@pytest.fixture
def leader() -> Iterator[tuple[Watch, tuple[str, int]]]:
    """The watch of process 0 of three, and its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    watch = Watch(0, 3, listener, {})
    watch.start()
    yield watch, address
    watch.close()


def stranger(address: tuple[str, int], who: int, count: int) -> Channel:
    channel = Channel(socket.create_connection(address))
    channel.send(Message("hello", who, count))
    return channel


def received(channel: Channel, kind: str) -> Message:
    """The next message of a kind; heartbeats come between."""
    while True:
        for message in channel.receive():
            if message.kind == kind:
                return message


def test_an_exchange(leader: tuple[Watch, tuple[str, int]]) -> None:
    watch, address = leader
    with ExitStack() as closing:
        others = [stranger(address, who, 3) for who in (1, 2)]
        for who, channel in enumerate(others, 1):
            closing.callback(channel.close)
            channel.send(Message("say", who, 0, f"value {who}", last=True))
        assert watch.result(0, time.monotonic()) is None  # process 0 has said nothing
        watch.say(Message("say", 0, 0, "value 0", last=True))
        values = ["value 0", "value 1", "value 2"]
        assert watch.result(0, time.monotonic() + 10) == values
        assert [received(channel, "all").value for channel in others] == [values] * 2
        assert watch.missing() == []


@pytest.mark.parametrize("said", [b'{"kind":"hello","text":"\xff"}\n', b"[" * 1500 + b"\n"])
def test_a_stranger_at_the_port_stops_nobody(leader: tuple[Watch, tuple[str, int]], said: bytes) -> None:
    _, address = leader
    with socket.create_connection(address) as connection:
        connection.sendall(said)
        assert connection.recv(1) == b""
    test_an_exchange(leader)


def test_a_thread_that_fails_ends_the_run(
    leader: tuple[Watch, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[int, str]] = []
    monkeypatch.setattr(watching, "end", lambda code, line: ended.append((code, line)))
    watch, address = leader

    def fails(process: int, message: Message) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(watch, "_take", fails)
    channel = stranger(address, 1, 3)
    channel.send(Message("beat", 1))
    watch._thread.join(10)
    channel.close()
    watch._closing = True
    watch._run()  # closes what a process that has ended does not hold any more
    assert ended == [(5, "error: the connection with the other processes has failed; found a fault of ours")]


@pytest.mark.parametrize(("who", "count", "why"), [(3, 3, "3 of 3"), (0, 3, "0 of 3"), (1, 2, "1 of 2")])
def test_who_is_not_taken_in(leader: tuple[Watch, tuple[str, int]], who: int, count: int, why: str) -> None:
    watch, address = leader
    channel = stranger(address, who, count)
    assert f"there are 3 processes, and this one is started as {why}" in received(channel, "failed").text
    assert watch.missing() == [1, 2]
    channel.close()
