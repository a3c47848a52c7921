"""The last line of the output, which is written over: on a terminal, and in a notebook.

Elsewhere, in a file or a pipe, nothing can be written over, and there are whole lines now and then.
"""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

NOTEBOOK_COLUMNS = 100
"""A notebook does not say how wide it is."""

BAR_WIDTH = 16
"""Of a bar, in columns."""


class LiveLine:
    """One line of text at the end of a stream, by default stderr.

    ``live`` says whether a line can be written over. ``gone`` says that the stream has failed: it is gone,
    full or closed. Nothing more is written then.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self.live = self._terminal or in_notebook()
        self.gone = False
        self._width = 0

    def show(self, text: str, end: str = "") -> None:
        """Writes the text over the last one, cut to the width before its end; elsewhere as a line."""
        if not self.live:
            self._write(f"{text}{end}\n")
            return
        columns = shutil.get_terminal_size().columns if self._terminal else NOTEBOOK_COLUMNS
        if len(text) + len(end) >= columns:
            text = text[: max(columns - 2 - len(end), 0)] + "…"
        text += end
        self._write(f"\r{text}{' ' * (self._width - len(text))}")
        self._width = len(text)

    def clear(self) -> None:
        """Leaves an empty line."""
        if self._width:
            self._write(f"\r{' ' * self._width}\r")
            self._width = 0

    def bar(self, share: float) -> str:
        """Returns a bar that is full at a share of 1, of characters that the stream can print."""
        full, empty = "█░"
        try:
            f"{full}{empty}".encode(getattr(self._stream, "encoding", None) or "utf-8")
        except UnicodeEncodeError:
            full, empty = "#."
        count = int(BAR_WIDTH * min(max(share, 0.0), 1.0))
        return full * count + empty * (BAR_WIDTH - count)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self.gone = True


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    kernel = sys.modules.get("ipykernel")
    return kernel is not None and hasattr(kernel, "kernelapp")
