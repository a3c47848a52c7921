"""A token ends a generation wherever it is, and the device is free for the next one."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import wanrun
from helpers.opened import LIMIT_SECONDS
from helpers.refusals import refuses
from wanrun.errors import CancelledError
from wanrun.generation.turns import Turns
from wanrun.opened.cancel import Waits
from wanrun.timing.timings import Timings
from wanrun.weights.restore import Restore


def test_while_it_waits_for_the_device() -> None:
    asked = threading.Event()

    class Asked(wanrun.CancelToken):
        def check(self) -> None:
            asked.set()
            super().check()

    def wait() -> None:
        with pytest.raises(CancelledError), turns.call(), turns.turn(token):
            raise AssertionError("it has the device")

    turns, token = Turns(), Asked()
    with turns.call(), turns.turn(), ThreadPoolExecutor(1) as threads:
        ended = threads.submit(wait)
        assert asked.wait(LIMIT_SECONDS) and not ended.done()
        assert "not cancelled" in repr(token)
        token.cancel()
        ended.result(LIMIT_SECONDS)
    with turns.call(), turns.turn() as waited:
        assert not waited  # it is not in the queue any more
    turns.close()


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "calls"), [("step", [1, 2]), ("scan", [4])])
def test_between_two_calls_of_the_loop(toy_artifact: Path, loop: str, calls: list[int]) -> None:
    with wanrun.load(toy_artifact, embeddings="none", loop=loop) as pipeline:
        expected = pipeline.generate("a fox", num_steps=4).latents
        token, timings, seen = wanrun.CancelToken(), Timings(), list[int]()

        def on_step(done: int, total: int) -> None:
            seen.append(done)
            if done >= 2:
                token.cancel()

        with refuses("cancelled", CancelledError):
            pipeline.generate("a fox", num_steps=4, cancel=token, on_step=on_step, timings=timings)
        assert seen == calls and timings.seconds.get("decode") is None
        with pytest.raises(CancelledError):
            pipeline.generate("a fox", num_steps=4, cancel=token)
        again = pipeline.generate("a fox", num_steps=4, cancel=wanrun.CancelToken())
        assert np.array_equal(again.latents, expected)
        with refuses("wrong_type", what="cancel", expected="CancelToken"):
            pipeline.generate("a fox", cancel=threading.Event())


@pytest.mark.slow
def test_while_it_is_loading(toy_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``load`` and a generation end while weights are read; the next ones find what has come meanwhile."""
    gate, tokens, result = threading.Event(), [wanrun.CancelToken()], Restore.result

    def slow(self: Restore, bits: bool = False) -> object:
        tokens[-1].cancel()
        assert gate.wait(LIMIT_SECONDS)
        return result(self, bits)

    monkeypatch.setattr(Restore, "result", slow)
    with refuses("cancelled", CancelledError):
        wanrun.load(toy_artifact, embeddings="none", cancel=tokens[-1])
    with wanrun.load(toy_artifact, embeddings="none", lazy=True) as pipeline:
        tokens.append(wanrun.CancelToken())
        with pytest.raises(CancelledError):
            pipeline.generate("a fox", num_steps=1, cancel=tokens[-1])
        gate.set()
        assert np.isfinite(pipeline.generate("a fox", num_steps=1).latents).all()


def test_waiting_of_one_thread() -> None:
    waits, token, future = Waits(), wanrun.CancelToken(), Future[int]()
    token.cancel()
    with waits.until(token), pytest.raises(CancelledError):
        waits.result(future)
    future.set_result(3)
    with waits.until(token):
        assert waits.result(future) == 3
