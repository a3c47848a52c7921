"""What a process learns of the others. How it ends with them is in test_group.py."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

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


@pytest.mark.parametrize(("who", "count", "why"), [(3, 3, "3 of 3"), (0, 3, "0 of 3"), (1, 2, "1 of 2")])
def test_who_is_not_taken_in(leader: tuple[Watch, tuple[str, int]], who: int, count: int, why: str) -> None:
    watch, address = leader
    channel = stranger(address, who, count)
    assert f"there are 3 processes, and this one is started as {why}" in received(channel, "failed").text
    assert watch.missing() == [1, 2]
    channel.close()
