"""Pictures in a terminal that can show them, in one place that is drawn again: Kitty's protocol, or iTerm2's.

- Kitty's, also Ghostty's: https://sw.kovidgoyal.net/kitty/graphics-protocol
- iTerm2's, also WezTerm's: https://iterm2.com/documentation-images.html
"""

from __future__ import annotations

__all__ = ["Pictures", "pictures_here"]

import base64
import io
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, TextIO

if TYPE_CHECKING:
    import numpy as np

Protocol = Literal["kitty", "iterm"]

ROWS: Final = 8
"""The most lines of a picture. A line is taken to be twice as tall as a column is wide."""

SHOWN: Final = 3
"""The most frames side by side."""

CHUNK: Final = 4096
"""Characters of one of Kitty's commands."""


def protocol_of(environment: Mapping[str, str]) -> Protocol | None:
    """Returns how a terminal takes pictures, as its variables say; None inside tmux and screen, and in CI."""
    if any(environment.get(name) for name in ("CI", "TMUX", "STY")):
        return None
    terminal, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
    if environment.get("KITTY_WINDOW_ID") or terminal in ("xterm-kitty", "xterm-ghostty"):
        return "kitty"
    if program in ("iTerm.app", "WezTerm") or environment.get("LC_TERMINAL") == "iTerm2":
        return "iterm"
    return None


def pictures_here(stream: TextIO | None = None) -> Pictures | None:
    """Returns the ``Pictures`` of a stream, by default stderr; None where nothing can be drawn."""
    stream = sys.stderr if stream is None else stream
    protocol = protocol_of(os.environ)
    return Pictures(stream, protocol) if protocol is not None and stream.isatty() else None


class Pictures:
    """One picture below the last line of a terminal.

    Args:
        stream: the terminal.
        protocol: how it takes pictures.
    """

    def __init__(self, stream: TextIO, protocol: Protocol) -> None:
        self._stream, self._protocol = stream, protocol
        self._drawn = False

    def show(self, frames: np.ndarray) -> None:
        """Draws the first, the middle and the last of frames over the last picture.

        The cursor is at the start of an empty line, and stays there.

        Args:
            frames: uint8 (T, h, w, 3).
        """
        strip = _strip(frames)
        height, width, _ = strip.shape
        columns = shutil.get_terminal_size().columns
        rows = max(1, min(ROWS, (columns - 1) * height // (2 * width)))
        draw = _kitty(_png(strip), rows) if self._protocol == "kitty" else _iterm(_png(strip), rows)
        room = "\n" * rows + f"\x1b[{rows}A"  # lines that are made at the end of the screen move it up
        self._write(f"{room}\x1b7\x1b[1B\r{draw}\x1b8")
        self._drawn = True

    def clear(self) -> None:
        """Takes the picture away, and all text from the cursor on."""
        if self._drawn:
            self._write(f"\r{_KITTY_DELETE if self._protocol == 'kitty' else ''}\x1b[J")
            self._drawn = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone, which the line of text notices too
            self._drawn = False


_KITTY_IMAGE: Final = 1_463_897_710
"""The number of the picture: another one takes the place of the last."""

_KITTY_DELETE: Final = f"\x1b_Ga=d,d=I,i={_KITTY_IMAGE},q=2\x1b\\"


def _kitty(png: bytes, rows: int) -> str:
    """Returns the commands that draw a picture; the terminal answers nothing, and moves no cursor."""
    text = base64.b64encode(png).decode()
    chunks = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]
    keys: Sequence[str] = [f"a=T,f=100,i={_KITTY_IMAGE},p=1,q=2,C=1,r={rows},", *[""] * (len(chunks) - 1)]
    more = [*[1] * (len(chunks) - 1), 0]
    return "".join(
        f"\x1b_G{first}m={follows};{chunk}\x1b\\"
        for first, follows, chunk in zip(keys, more, chunks, strict=True)
    )


def _iterm(png: bytes, rows: int) -> str:
    """Returns the command that draws a picture and moves no cursor."""
    keys = f"inline=1;size={len(png)};height={rows};preserveAspectRatio=1;doNotMoveCursor=1"
    return f"\x1b]1337;File={keys}:{base64.b64encode(png).decode()}\x07"


def _strip(frames: np.ndarray) -> np.ndarray:
    """Returns the first, the middle and the last frame side by side, (h, w, 3)."""
    import numpy as np

    chosen = dict.fromkeys(np.linspace(0, len(frames) - 1, SHOWN).round().astype(int).tolist())
    return np.concatenate([frames[number] for number in chosen], 1)


def _png(picture: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()
