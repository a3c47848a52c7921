"""How much of a loop is done: a line on a terminal, lines now and then in a log."""

from __future__ import annotations

import io
import threading

import pytest

from helpers.terminal import Terminal, until
from wanbuild.progress_line import ProgressLine
from wanrun.terminal import status


def test_progress_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "LOG_SECONDS", 0.01)
    stream = io.StringIO()
    with ProgressLine(57_300_000_000, "convert", stream=stream) as progress:
        progress.advance(57_300_000_000)
        until(lambda: "57.3 GB of" in stream.getvalue())
    line = stream.getvalue().splitlines()[-1]
    assert line.startswith("waiting: ") and line.count("57.3 GB") == 2


def test_progress_that_is_quick_says_nothing() -> None:
    stream = io.StringIO()
    with ProgressLine(1000, "convert", unit="tensor", stream=stream) as progress:
        for _ in range(1000):
            progress.advance()
    assert stream.getvalue() == ""


def test_progress_counts_from_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "BLINK_SECONDS", 0.01)
    stream = Terminal()
    with ProgressLine(800, "convert", "tensor", stream=stream) as progress:

        def work() -> None:
            for _ in range(100):
                progress.advance()

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: "converting (800 of 800 tensors), 0 s" in stream.getvalue())
