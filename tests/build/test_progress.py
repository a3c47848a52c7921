"""How much of a loop is done; the line itself is tested with the runtime's status."""

from __future__ import annotations

import threading

import pytest

from helpers.terminal import Terminal, until
from wanbuild.progress_line import ProgressLine
from wanrun.terminal import status


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
