"""A line that says what a command is waiting for, and how long already.

On a terminal it is the last line, cut to the terminal's width, and goes away. In a log it is a line every
10 s, so that what is quick says nothing.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, TracebackType
from typing import TextIO

from wanrun.activities import Activity
from wanrun.units import in_bytes

WORDS: Mapping[str, str] = MappingProxyType(
    {
        "compile": "compiling {}",
        "decode": "decoding the video",
        "denoise": "denoising",
        "encode_media": "encoding images and videos",
        "encode_video": "writing the video",
        "executables": "loading {}",
        "import": "importing {}",
        "join": "waiting for the other processes",
        "prepare": "preparing the steps",
        "read_media": "reading images and videos",
        "restore": "reading {}",
        "text": "encoding the prompt",
        "transfer": "bringing {} to the device",
        "trial": "trying executables that were built elsewhere",
        "wait": "waiting for the device",
        "warmup": "warming up",
    }
)
"""What is said of an activity, by its phase, with its label; others are not shown."""

BLINK_SECONDS, LOG_SECONDS = 0.2, 10.0
"""How often the line is written, on a terminal and in a log."""


def told(activities: Sequence[Activity]) -> str:
    """Returns what is going on in words, such as ``reading vae 0.21 of 0.51 GB, loading decode_video``."""
    parts: dict[str, None] = {}
    for one in activities:
        if one.phase in WORDS:
            text = WORDS[one.phase].format((one.label or "what it needs").replace("_", " "))
            if one.progress is not None:
                done, total = one.progress()
                text += f" ({in_bytes(done)} of {in_bytes(total)})"
            parts[text] = None
    return ", ".join(parts)


class Status:
    """Shows what is going on while a block runs.

    Args:
        running: returns the activities.
        stream: the output, by default stderr.

    Attributes:
        stepping: whether a bar counts the steps of ``denoise``, so that this line has nothing to say of them.
    """

    def __init__(self, running: Callable[[], Sequence[Activity]], stream: TextIO | None = None) -> None:
        self._running, self._stream = running, sys.stderr if stream is None else stream
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._pauses, self._width, self.stepping = 0, 0, False
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="wanrun status", daemon=True)

    def __enter__(self) -> Status:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        with self._lock:
            self._clear()
            self._pauses += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Shows nothing while a block runs, which prints. The time begins anew after it."""
        with self._lock:
            self._clear()
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                self._since = time.monotonic()

    def around(self, tell: Callable[[str], None]) -> Callable[[str], None]:
        """Returns a function that prints a line with nothing of this one left before it."""

        def alone(line: str) -> None:
            with self.paused():
                tell(line)

        return alone

    def _run(self) -> None:
        on_terminal = self._stream.isatty()
        while not self._ended.wait(BLINK_SECONDS if on_terminal else LOG_SECONDS):
            with self._lock:
                if not self._pauses:
                    self._show(on_terminal)

    def _show(self, on_terminal: bool) -> None:
        activities = [one for one in self._running() if one.phase in WORDS]
        if self.stepping and any(one.phase == "denoise" for one in activities):
            self._width = 0  # the bar has the line
            return
        if not activities:
            self._clear()
            return
        seconds = time.monotonic() - max(activities[0].begun, self._since)
        text = f"{told(activities)}, {seconds:.0f} s"
        if on_terminal:
            columns = shutil.get_terminal_size().columns
            text = text if len(text) < columns else text[: columns - 2] + "…"
            self._write(f"\r{text}{' ' * (self._width - len(text))}")
            self._width = len(text)
        else:
            self._write(f"waiting: {text}\n")

    def _clear(self) -> None:
        if self._width:
            self._write(f"\r{' ' * self._width}\r")
            self._width = 0

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # gone, full or closed: nothing more is shown
            self._ended.set()
