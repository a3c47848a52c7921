"""The status line: what a command waits for, and for how long, for bytes, steps and everything else.

On a terminal it is one line, rewritten and then erased. Elsewhere it is a line every 10 s, so that quick
phases print nothing.
"""

from __future__ import annotations

__all__ = ["Status"]

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, TracebackType
from typing import TextIO

from wanrun.terminal.live_line import LiveLine, in_notebook
from wanrun.timing.clock import now
from wanrun.timing.spans import Span
from wanrun.units import in_bytes, in_minutes

WORDS: Mapping[str, str] = MappingProxyType(
    {
        "build": "building {}",
        "check": "checking prompts",
        "compile": "compiling {}",
        "convert": "converting",
        "decode": "decoding the video",
        "denoise": "denoising",
        "download": "downloading",
        "encode_media": "encoding images and videos",
        "encode_video": "writing the video",
        "executables": "loading {}",
        "fetch": "fetching the artifact",
        "import": "importing {}",
        "join": "waiting for the other processes",
        "live": "making the live video",
        "prepare": "preparing the steps",
        "read_media": "reading images and videos",
        "restore": "reading {}",
        "text": "encoding the prompt",
        "transfer": "bringing {} to the device",
        "trial": "attesting executables that were built elsewhere",
        "wait": "waiting for the device",
        "warmup": "warming up",
        "write": "writing a layer",
    }
)
"""The text about a span by its phase; its label may follow. Other phases are not shown."""

BLINK_SECONDS, LOG_SECONDS = 0.2, 10.0
"""How often the line is written, over the last one and in a log."""


def progress_of(span: Span) -> tuple[int, int, str] | None:
    """Returns how much of a span's work is done, all of it, and both in words; None if that is not counted.

    The words are such as ``12 of 50 steps``, or ``1.24 GB of 2.84 GB``.
    """
    if (progress := span.progress) is None:
        return None
    done, total = progress()
    if span.unit == "B":
        return done, total, f"{in_bytes(done)} of {in_bytes(total)}"
    return done, total, f"{done} of {total} {span.unit}s"


def told(spans: Sequence[Span]) -> str:
    """Returns the running spans in words: ``reading vae (0.21 GB of 0.51 GB), loading decode_video``."""
    parts: dict[str, None] = {}
    for one in spans:
        if one.phase in WORDS:
            word, label = WORDS[one.phase], (one.label or "").replace("_", " ")
            text = word.format(label or "what it needs")
            if label and "{}" not in word:
                text += f" ({label})"
            progress = progress_of(one)
            parts[text if progress is None else f"{text} ({progress[2]})"] = None
    return ", ".join(parts)


class Status:
    """Shows what is going on while a block runs.

    Args:
        running: returns the spans that go on.
        stream: the output, by default stderr.

    Attributes:
        place: what stands in front, such as ``[2/8] ``, or nothing.
    """

    def __init__(self, running: Callable[[], Sequence[Span]], stream: TextIO | None = None) -> None:
        self._running, self._line = running, LiveLine(stream)
        self.place = ""
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._pauses = 0
        self._since = now()
        self._thread = threading.Thread(target=self._run, name="wanrun status", daemon=True)

    def __enter__(self) -> Status:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        with self._lock:
            self._line.clear()
            self._pauses += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Shows nothing while a block runs, which prints. The time begins anew after it."""
        with self._lock:
            self._line.clear()
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                self._since = now()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Leaves an empty line while a block runs, which draws elsewhere; the time goes on."""
        with self._lock:
            self._line.clear()
            yield

    def _run(self) -> None:
        live = self._line.live
        while not (self._line.gone or self._ended.wait(BLINK_SECONDS if live else LOG_SECONDS)):
            with self._lock:
                if not self._pauses:
                    self._show()

    def _show(self) -> None:
        spans = [one for one in self._running() if one.phase in WORDS]
        if not spans:
            self._line.clear()
            return
        moment, bar = now(), ""
        text, end = f"{self.place}{told(spans)}", f", {moment - max(spans[0].start, self._since):.0f} s"
        for one in spans:
            done, total, _ = progress_of(one) or (0, 0, "")
            if 0 < done < total:
                left = (moment - one.start) / done * (total - done)
                bar = f"{self._line.bar(done / total)} "
                end += f", {in_minutes(left)} left"
                break
        self._line.show(f"{bar}{text}" if self._line.live else f"waiting: {text}", end)


def shown(progress: bool | None) -> bool:
    """Returns whether a Python program's waits are shown: as it says, else in a notebook."""
    return in_notebook() if progress is None else progress
