"""One at a time and in the order of arrival, until it is closed; a fork of the process is refused at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers.opened import LIMIT_SECONDS, eventually
from helpers.refusals import check_refusal, refuses
from wanrun.errors import UsageError
from wanrun.generation.turns import Turns


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


class Holder:
    """A thread that has the device until it is told to let go."""

    def __init__(self, turns: Turns, threads: ThreadPoolExecutor) -> None:
        self._let_go, self.has = threading.Event(), threading.Event()
        self._turns = turns
        self._done = threads.submit(self._hold)
        assert self.has.wait(LIMIT_SECONDS)

    def _hold(self) -> None:
        with self._turns.call(), self._turns.turn() as waited:
            assert not waited
            self.has.set()
            self._let_go.wait(LIMIT_SECONDS)

    def let_go(self) -> None:
        self._let_go.set()
        self._done.result(LIMIT_SECONDS)


def arrive(
    turns: Turns, threads: ThreadPoolExecutor, work: Callable[[bool], Any], position: int
) -> Future[Any]:
    """Asks for the device in another thread, and returns when that is the one at this position."""

    def run() -> Any:
        with turns.call(), turns.turn() as waited:
            return work(waited)

    future = threads.submit(run)
    assert eventually(lambda: len(turns._queue) == position + 1, LIMIT_SECONDS)
    return future


def test_in_the_order_of_arrival(threads: ThreadPoolExecutor) -> None:
    turns, served = Turns(), list[int]()
    holder = Holder(turns, threads)
    futures = [
        arrive(turns, threads, lambda waited, n=n: served.append(n if waited else -1), 1 + n)  # type: ignore[misc]
        for n in range(10)
    ]
    assert served == []
    holder.let_go()
    for future in futures:
        future.result(LIMIT_SECONDS)
    assert served == list(range(10))
    with turns.turn() as waited:
        assert not waited


def test_a_thread_that_fails_lets_the_next_in(threads: ThreadPoolExecutor) -> None:
    turns = Turns()
    holder = Holder(turns, threads)

    def fail(waited: bool) -> None:
        raise RuntimeError("no")

    failing, working = arrive(turns, threads, fail, 1), arrive(turns, threads, lambda waited: "made", 2)
    holder.let_go()
    assert isinstance(failing.exception(LIMIT_SECONDS), RuntimeError)
    assert working.result(LIMIT_SECONDS) == "made"


def test_an_interrupt_while_waiting_leaves_the_queue(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns()
    holder = Holder(turns, threads)

    def interrupt(*arguments: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(turns._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt), turns.call(), turns.turn():
            raise AssertionError("it waits")
    assert len(turns._queue) == 1
    waiting = arrive(turns, threads, lambda waited: waited, 1)
    holder.let_go()
    assert waiting.result(LIMIT_SECONDS) is True
    assert not turns._calls and not turns._queue


def test_the_device_is_not_asked_for_twice_by_one_thread() -> None:
    turns = Turns()
    with turns.call(), turns.turn():
        with refuses("busy", what="a generation"), turns.call(), turns.turn():
            raise AssertionError("it waits for itself")
        with turns.call():  # which needs no device
            pass
        with refuses("busy", what="a call", remedy="close"):
            turns.close()
    with turns.call(), turns.turn() as waited:
        assert not waited
    turns.close()


def test_close(threads: ThreadPoolExecutor) -> None:
    """It waits for the call that has the device and for those that need none, and refuses the others."""
    turns, reading = Turns(), threading.Event()
    holder = Holder(turns, threads)
    waiting = arrive(turns, threads, lambda waited: "made", 1)

    def read() -> str:
        with turns.call():
            reading.wait(LIMIT_SECONDS)
            return "read"

    needs_none = threads.submit(read)
    assert eventually(lambda: len(turns._calls) == 3, LIMIT_SECONDS)
    closing = threads.submit(turns.close)
    error = waiting.exception(LIMIT_SECONDS)
    assert isinstance(error, UsageError)
    check_refusal(error, "closed", remedy="load")
    assert not closing.done()
    holder.let_go()
    assert eventually(lambda: len(turns._calls) == 1, LIMIT_SECONDS)
    assert not closing.done()
    with refuses("closed"), turns.call():
        raise AssertionError("it is let in")
    reading.set()
    closing.result(LIMIT_SECONDS)
    assert needs_none.result(LIMIT_SECONDS) == "read"
    turns.close()  # once more


def test_a_call_that_is_late_for_the_device(threads: ThreadPoolExecutor) -> None:
    """It read its images while the pipeline was being closed."""
    turns, closed = Turns(), threading.Event()

    def call() -> None:
        with turns.call():
            closed.wait(LIMIT_SECONDS)
            with turns.turn():
                raise AssertionError("it has the device")

    late = threads.submit(call)
    assert eventually(lambda: len(turns._calls) == 1, LIMIT_SECONDS)
    closing = threads.submit(turns.close)
    assert eventually(lambda: turns._closed, LIMIT_SECONDS)
    closed.set()
    assert isinstance(late.exception(LIMIT_SECONDS), UsageError)
    closing.result(LIMIT_SECONDS)


# Forks of a process that has loaded an artifact.


FORKING = """
import multiprocessing, os, sys, threading, time, warnings
import numpy as np
import wanrun
from wanrun.errors import UsageError

warnings.simplefilter("ignore", RuntimeWarning)  # JAX's, at a fork
artifact, how = sys.argv[1:]

def refused(call):
    started = time.monotonic()
    try:
        call()
    except UsageError as error:
        assert time.monotonic() - started < 5
        print(error, flush=True)
    else:
        raise AssertionError("it is not refused")

def child(pipeline):
    refused(lambda: pipeline.generate("a fox"))
    refused(pipeline.warmup)
    refused(lambda: pipeline.encode_prompts(["a fox"]))
    refused(lambda: pipeline.component_weights("vae"))
    refused(lambda: wanrun.load(artifact))
    refused(pipeline.__enter__)
    pipeline.close()
    pipeline.__exit__(None, None, None)

def forked(pipeline):
    if how == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=child, args=(pipeline,))
        process.start()
        process.join(60)
        return process.exitcode
    number = os.fork()
    if number == 0:
        try:
            child(pipeline)
        except BaseException:
            os._exit(1)
        os._exit(0)  # as multiprocessing: XLA's own end fails without its threads
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])

with wanrun.load(artifact, embeddings="none") as pipeline:
    expected = pipeline.generate("a fox", num_steps=2).latents
    codes = []
    def fork_once(step, total):  # while a thread has the device, and locks are held
        codes.append(forked(pipeline))
    found = pipeline.generate("a fox", num_steps=2, on_step=fork_once).latents
    assert codes == [0, 0], codes
    assert forked(pipeline) == 0
    assert np.array_equal(found, expected)
    assert np.array_equal(pipeline.generate("a fox", num_steps=2).latents, expected)
print("done")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["multiprocessing", "fork"])
def test_a_fork_after_load(toy_artifact: Path, how: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(toy_artifact), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the fork that hangs
        process.communicate()
        raise
    assert process.returncode == 0, err
    *lines, last = out.splitlines()
    assert last == "done" and len(lines) == 3 * 6
    for number, line in enumerate(lines):
        assert line.startswith("JAX " if number % 6 == 4 else "the pipeline ") and " spawn" in line
        assert f" process {process.pid};" in line


def test_a_lock_that_is_held_when_a_process_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for it."""
    turns, own = Turns(), os.getpid()
    assert not turns.forked
    with turns._changed:
        monkeypatch.setattr(os, "getpid", lambda: own + 1)
        assert turns.forked
        for call in (lambda: turns.call().__enter__(), turns.close):
            with refuses("closed", expected=own, found=own + 1, remedy="spawn"):
                call()
