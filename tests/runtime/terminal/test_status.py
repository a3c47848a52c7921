"""The line that says what is waited for, and is written over."""

from __future__ import annotations

import io
import sys
import time
from types import SimpleNamespace

import pytest

from helpers.terminal import Terminal, until
from wanrun.terminal import status
from wanrun.terminal.live_line import NOTEBOOK_COLUMNS, LiveLine, in_notebook
from wanrun.terminal.status import Status, shown, told
from wanrun.timing.spans import Span, Spans


def span(phase: str, label: str | None = None, done: tuple[int, int] | None = None) -> Span:
    return Span(phase, label, 0.0, progress=None if done is None else lambda: done)


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ([], ""),
        ([span("manifest")], ""),
        ([span("import", "jax")], "importing jax"),
        (
            [span("restore", "transformer_2", (1_240_000_000, 2_840_000_000)), span("text")],
            "reading transformer 2 (1.24 GB of 2.84 GB), encoding the prompt",
        ),
        ([span("transfer", "vae"), span("transfer", "vae")], "bringing vae to the device"),
        ([span("import")], "importing what it needs"),
        (
            [Span("check", None, 0.0, progress=lambda: (3, 9), unit="prompt")],
            "checking prompts (3 of 9 prompts)",
        ),
        ([span("decode", "17 frames")], "decoding the video (17 frames)"),
    ],
)
def test_what_is_told(spans: list[Span], text: str) -> None:
    assert told(spans) == text


def test_on_a_terminal_it_is_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "BLINK_SECONDS", 0.01)
    monkeypatch.setenv("COLUMNS", "24")
    spans, stream = Spans(), Terminal()
    with Status(lambda: spans.running, stream), spans.phase("decode"):
        until(lambda: stream.getvalue().count("\r") > 1)
    first, *shown, blank, last = stream.getvalue().split("\r")
    assert first == last == ""
    (one,) = set(shown)
    assert "decod" in one and one.endswith(", 0 s") and len(one) < 24 and blank == " " * len(one)
    assert "\n" not in stream.getvalue()


def test_in_a_log_it_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "LOG_SECONDS", 0.01)
    spans, stream = Spans(), io.StringIO()
    with Status(lambda: spans.running, stream):
        time.sleep(0.05)
        assert stream.getvalue() == ""  # nothing is waited for
        with spans.phase("compile", "decode_video"):
            until(lambda: stream.getvalue().count("\n") > 1)
    (line,) = set(stream.getvalue().splitlines())
    assert "compil" in line and "decode video" in line and line.endswith(", 0 s")


def test_it_gives_way_to_other_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the last of those that print at once has ended."""
    monkeypatch.setattr(status, "BLINK_SECONDS", 0.01)
    spans, stream = Spans(), Terminal()
    with Status(lambda: spans.running, stream) as line, spans.phase("decode"):
        until(lambda: "decoding" in stream.getvalue())
        one, other = line.paused(), line.paused()
        one.__enter__(), other.__enter__()
        begun = len(stream.getvalue())
        assert stream.getvalue().endswith(" \r")
        one.__exit__(None, None, None)
        time.sleep(0.05)
        assert len(stream.getvalue()) == begun
        other.__exit__(None, None, None)
        until(lambda: len(stream.getvalue()) > begun)


def test_steps_have_a_bar_and_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "BLINK_SECONDS", 0.01)
    spans, stream, reached = Spans(), Terminal(), [(0, 50)]
    with (
        Status(lambda: spans.running, stream) as line,
        spans.phase("denoise", progress=lambda: reached[-1], unit="step"),
    ):
        line.place = "[2/8] "
        until(lambda: "(0 of 50 steps), 0 s" in stream.getvalue())
        assert "█" not in stream.getvalue()  # nothing to say how long it takes
        reached.append((25, 50))
        until(lambda: "░" in stream.getvalue())
    shown = next(part for part in stream.getvalue().split("\r") if "░" in part)
    bar, place, *_ = shown.split()
    assert (bar, place) == ("████████░░░░░░░░", "[2/8]")
    assert "(25 of 50" in shown and "0:00" in shown


# The line itself.


@pytest.mark.parametrize(
    ("columns", "texts", "expected"),
    [
        (12, [("decoding the",), ("done",)], "\rdecoding t…\rdone       \r    \r"),
        (
            24,
            [("reading transformer, loading it", ", 9 s left")],
            "\rreading tran…, 9 s left\r" + " " * 23 + "\r",
        ),
    ],
)
def test_a_terminal(
    columns: int, texts: list[tuple[str, ...]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut to the width, where its end stays; it covers a longer one, and goes away."""
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    line = LiveLine(stream)
    assert line.live
    for text in texts:
        line.show(*text)
    line.clear()
    line.clear()
    assert stream.getvalue() == expected


def test_a_log() -> None:
    stream = io.StringIO()
    line = LiveLine(stream)
    assert not line.live
    line.show("decoding the video")
    line.clear()
    assert stream.getvalue() == "decoding the video\n"


def test_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not in_notebook() and not shown(None) and shown(True)
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())  # imported, and no kernel runs
    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace(kernelapp=None))
    assert shown(None) and not shown(False)
    stream = io.StringIO()
    line = LiveLine(stream)
    line.show("x" * 200)
    assert line.live and len(stream.getvalue()) == NOTEBOOK_COLUMNS and "\n" not in stream.getvalue()


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
