"""The line at the end of the output that is written over."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from helpers.terminal import Terminal
from wanrun.terminal.live_line import NOTEBOOK_COLUMNS, LiveLine, in_notebook


def test_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut to the width, covers a longer one, and goes away."""
    monkeypatch.setenv("COLUMNS", "12")
    stream = Terminal()
    line = LiveLine(stream)
    assert line.live
    for text in ("decoding the video", "done"):
        line.show(text)
    line.clear()
    line.clear()
    assert stream.getvalue() == "\rdecoding t…\rdone       \r    \r"


def test_the_end_of_a_line_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    LiveLine(stream).show(
        "reading transformer (1.24 GB of 2.84 GB), loading denoise step, " * 2, ", 9 s, 11 s left"
    )
    (shown,) = stream.getvalue().split("\r")[1:]
    assert (
        len(shown) == 59 and shown.endswith("…, 9 s, 11 s left") and shown.startswith("reading transformer")
    )


def test_a_log() -> None:
    stream = io.StringIO()
    line = LiveLine(stream)
    assert not line.live
    line.show("decoding the video")
    line.clear()
    assert stream.getvalue() == "decoding the video\n"


def test_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())  # imported, and no kernel runs
    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace(kernelapp=None))
    stream = io.StringIO()
    line = LiveLine(stream)
    line.show("x" * 200)
    assert line.live and len(stream.getvalue()) == NOTEBOOK_COLUMNS


@pytest.mark.parametrize("error", [OSError("full"), ValueError("closed")])
def test_a_stream_that_fails(error: Exception) -> None:
    class Failing(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    line = LiveLine(Failing())
    assert not line.gone
    line.show("a")
    assert line.gone


def test_a_bar_of_what_the_stream_can_print() -> None:
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert LiveLine(ascii_only).bar(0.5) == "########........"
    assert LiveLine(io.StringIO()).bar(2) == "█" * 16
    assert LiveLine(io.StringIO()).bar(0) == "░" * 16
