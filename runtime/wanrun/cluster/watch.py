"""The thread that keeps a process in touch with the others of its run, and ends it when one of them is lost.

| what happened to a process | how the others know |
|---|---|
| it ends with an error or by a signal | it says so before |
| it is killed, or crashes | its connection is closed |
| it is stopped, or its network is lost | no heartbeat for ``SILENT_SECONDS`` |

Process 0 has a connection to each of the others, and passes on what it learns.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from wanrun.cluster.channel import MAX_MESSAGE_BYTES, MAX_STRANGE_BYTES, Channel, Message
from wanrun.cluster.company_key import VARIABLE
from wanrun.errors import ClusterError, escaped
from wanrun.terminal.undo import end

BEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""

SILENT_SECONDS = 15.0
"""Seconds without a heartbeat until a process counts as lost. Loading may hold Python's lock for some."""

GRACE_SECONDS = 1.0
"""Seconds in which a process with an error or a signal of its own reports that, instead of naming another."""

CLOSE_SECONDS = 3.0
"""Seconds in which the others read the last message before this process ends."""


class Watch:
    """Connections to the other processes, and the thread that reads from them.

    Args:
        listener: of process 0, where the others connect.
        channels: of another process, its channel to process 0.
        proof: what process 0 asks of who connects, before it looks at anything else.

    Attributes:
        told: set once another process is known to have ended the run.
    """

    def __init__(
        self,
        process: int,
        count: int,
        listener: socket.socket | None,
        channels: Mapping[int, Channel],
        proof: bytes = b"",
    ) -> None:
        self._process, self._count, self._listener, self._proof = process, count, listener, proof
        self._channels = dict(channels)
        self._heard = dict.fromkeys(self._channels, time.monotonic())
        self._said: dict[int, dict[int, Any]] = {}
        self._results: dict[int, list[Any]] = {}
        self._changed = threading.Condition()
        self._over = threading.Event()  # this process ends: nothing that others do is news
        self._ending = threading.Lock()
        self._closing = False
        self.told = threading.Event()
        self._selector = selectors.DefaultSelector()
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        for channel in self._channels.values():
            self._selector.register(channel, selectors.EVENT_READ, channel)
        self._thread = threading.Thread(target=self._run_or_end, name="group", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def say(self, message: Message) -> None:
        """Brings this process's value of an exchange to process 0."""
        if self._process == 0:
            self._collect(message)
        else:
            self._send([0], message)

    def result(self, number: int, deadline: float | None) -> list[Any] | None:
        """Waits for the values of an exchange; None after the deadline."""
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        with self._changed:
            self._changed.wait_for(lambda: number in self._results, seconds)
            return self._results.pop(number, None)

    def missing(self) -> list[int]:
        """Returns the processes that process 0 has not heard of; none in the others, which do not know."""
        if self._process:
            return []
        return sorted(set(range(1, self._count)) - self._channels.keys())

    def fail(self, text: str) -> None:
        """Tells the others why this process ends; they end too. A second call does nothing."""
        with self._ending:
            if self._over.is_set():
                return
            self._over.set()
        everybody = list(self._channels.values())
        self._send(list(self._channels), Message("failed", self._process, text=f"failed: {text}"))
        for channel in everybody:
            channel.finish()
        self._await_closed()

    def close(self) -> None:
        """Closes the connections and ends the thread."""
        self._over.set()
        if self._process == 0:
            self._await_closed()
        self._closing = True
        self._thread.join()

    def _send(self, processes: list[int], message: Message) -> None:
        """Sends to the processes that can be reached; the reading thread notices the others."""
        for process in processes:
            if (channel := self._channels.get(process)) is not None:
                with contextlib.suppress(OSError):
                    channel.send(message)

    def _await_closed(self) -> None:
        """Waits until all others have ended: messages that they have not read are lost with this process."""
        with self._changed:
            self._changed.wait_for(lambda: not self._channels, CLOSE_SECONDS)

    def _run_or_end(self) -> None:
        """Runs until ``close``; without this thread, nobody would know that another process is lost."""
        try:
            self._run()
        except Exception as error:
            failed = ClusterError("the connection with the other processes has failed", found=error)
            self._over.set()
            end(failed.exit_code, f"error: {escaped(str(failed))}")

    def _run(self) -> None:
        beat = tick = time.monotonic()
        while not self._closing:
            for key, _ in self._selector.select(BEAT_SECONDS / 4):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            now = time.monotonic()
            if now - tick > SILENT_SECONDS / 2:  # this process was stopped, and has not read what came
                self._heard = dict.fromkeys(self._channels, now)
            tick = now
            if now - beat >= BEAT_SECONDS:
                beat = now
                self._send(list(self._channels), Message("beat", self._process))
            for process, heard in list(self._heard.items()):
                if now - heard > SILENT_SECONDS and process in self._channels:
                    self._lost(
                        process,
                        f"has been silent for {SILENT_SECONDS:.0f} s: it is stopped, or its network is lost",
                    )
        for key in list(self._selector.get_map().values()):  # strangers' too
            if key.data is not None:
                key.data.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            channel = Channel(self._listener.accept()[0], self._proof)
            channel.limit = MAX_STRANGE_BYTES
            self._selector.register(channel, selectors.EVENT_READ, channel)

    def _read(self, channel: Channel) -> None:
        """Handles the messages that have come in on a channel."""
        process = next((number for number, one in self._channels.items() if one is channel), None)
        try:
            messages = channel.receive()
        except OSError as error:
            if isinstance(error, PermissionError):
                self._refuse(channel, f"its {VARIABLE} is another one")
            self._selector.unregister(channel)
            channel.close()
            if process is not None:
                with self._changed:
                    del self._channels[process]
                    self._changed.notify_all()
                self._lost(process, "is gone: its connection is closed")
            return
        for message in messages:
            if process is None:
                process = self._greet(channel, message)
            else:
                self._heard[process] = time.monotonic()
                self._take(process, message)

    def _refuse(self, channel: Channel, why: str) -> None:
        with contextlib.suppress(OSError):
            channel.send(Message("failed", 0, text=f"does not take this process in: {why}"))

    def _greet(self, channel: Channel, message: Message) -> int | None:
        """Accepts a process that introduces itself, or tells it why not."""
        who, count = message.process, message.number
        wrong = None
        if message.kind != "hello" or not 0 < who < self._count or count != self._count:
            wrong = f"there are {self._count} processes, and this one is started as {who} of {count}"
        elif who in self._channels or self.told.is_set():
            wrong = f"there is a process {who} already"
        if wrong is not None:
            self._refuse(channel, wrong)
            return None
        channel.limit = MAX_MESSAGE_BYTES
        self._channels[who] = channel
        self._heard[who] = time.monotonic()
        return who

    def _take(self, process: int, message: Message) -> None:
        if message.kind == "say" and self._process == 0:
            self._collect(message)
        elif message.kind == "all":
            self._deliver(message)
        elif message.kind == "failed":
            self._lost(message.process, message.text)

    def _collect(self, message: Message) -> None:
        """Process 0 gives the values of an exchange to all when it has them all."""
        with self._changed:
            said = self._said.setdefault(message.number, {})
            said[message.process] = message.value
            if len(said) < self._count:
                return
            values = [value for _, value in sorted(self._said.pop(message.number).items())]
        whole = Message("all", 0, message.number, values, last=message.last)
        self._send(list(self._channels), whole)
        self._deliver(whole)

    def _deliver(self, message: Message) -> None:
        if message.last:
            self._over.set()
        with self._changed:
            self._results[message.number] = message.value
            self._changed.notify_all()

    def _lost(self, process: int, what: str) -> None:
        """Ends this process, because another one has ended, unless this one ends by itself."""
        if self._over.is_set():
            return
        self.told.set()
        if self._process == 0:
            self._send(list(self._channels), Message("failed", process, text=what))
        if self._over.wait(GRACE_SECONDS):
            return
        with self._ending:
            if self._over.is_set():
                return
            self._over.set()
        this = ", this one," if process == self._process else ""
        error = ClusterError(f"process {process} of {self._count}{this} {what}")
        end(error.exit_code, f"error: {escaped(str(error))}")
