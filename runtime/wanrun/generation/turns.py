"""Gives a pipeline's device to the calls of several threads in order, and ends all calls at closing."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from wanrun.errors import UsageError
from wanrun.machine.jax_process import own_options
from wanrun.opened.cancel import ASK_SECONDS, CancelToken
from wanrun.timing.timings import Timings


class Turns:
    """Admits any number of calls, and gives the device to one of them at a time, in the order of arrival.

    ``close`` ends this: it waits until no call is inside. A fork of the process has none of its threads, so
    a lock may be held there for ever: calls of a fork are refused before they take one.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._calls: dict[object, int] = {}  # the thread of every call that is inside
        self._queue: deque[int] = deque()  # threads that asked for the device; the first has it
        self._closed = False

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the process that made this object."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self.forked:
            raise UsageError(
                "closed",
                "the pipeline was loaded in another process, of which this one is a fork",
                expected=f"process {self._process}",
                found=os.getpid(),
                remedy="load the artifact in a process that is started by spawn, not by fork",
            )

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("closed", "the pipeline is closed", remedy="load the artifact again")

    @contextmanager
    def call(self) -> Iterator[None]:
        """Counts a call as inside while the block runs. Raises UsageError after ``close``, and in a fork."""
        self._check_process()
        call = object()
        try:
            with self._changed:
                self._check_open()
                self._calls[call] = threading.get_ident()
            with own_options():
                yield
        finally:
            with self._changed:
                self._calls.pop(call, None)
                self._changed.notify_all()

    @contextmanager
    def device(self, timings: Timings, cancel: CancelToken | None = None) -> Iterator[None]:
        """Holds the device while the block runs, as ``turn``; the time of waiting for it is recorded."""
        asked = timings.now()
        with self.turn(cancel) as waited:
            if waited:
                timings.add("wait", asked, timings.now())
            yield

    @contextmanager
    def turn(self, cancel: CancelToken | None = None) -> Iterator[bool]:
        """Waits for the device and holds it while the block runs; yields whether the call had to wait.

        Raises CancelledError once the token is cancelled, before the block runs; UsageError if ``close`` is
        called meanwhile, or if this thread has the device already.
        """
        thread = threading.get_ident()
        with self._changed:
            if thread in self._queue:
                raise UsageError(
                    "busy",
                    "a generation of this pipeline is going on in this thread",
                    remedy="make the call before or after it, not in on_step",
                )
        try:
            with self._changed:
                self._queue.append(thread)
                waited = self._queue[0] != thread
                asking = None if cancel is None else ASK_SECONDS
                while not self._changed.wait_for(lambda: self._closed or self._queue[0] == thread, asking):
                    assert cancel is not None
                    cancel.check()
                self._check_open()
            if cancel is not None:
                cancel.check()
            yield waited
        finally:
            with self._changed:
                if thread in self._queue:
                    self._queue.remove(thread)
                self._changed.notify_all()

    def close(self) -> None:
        """Refuses later calls and calls that wait for the device, and waits until the others end.

        Raises UsageError if this thread is inside a call, and in a fork.
        """
        self._check_process()
        with self._changed:
            if threading.get_ident() in self._calls.values():
                raise UsageError(
                    "busy",
                    "a call of this pipeline is going on in this thread",
                    remedy="close it after the call, not in on_step",
                )
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._calls)
