"""The commands that draw a picture in a terminal, and where they are written."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from helpers.terminal import Terminal
from wanrun.terminal.pictures import CHUNK, Pictures, Protocol, pictures_here, protocol_of

FRAMES = np.random.default_rng(0).integers(0, 256, (5, 60, 104, 3), np.uint8)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM": "xterm-ghostty", "TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM_PROGRAM": "iTerm.app"}, "iterm"),
        ({"TERM_PROGRAM": "WezTerm"}, "iterm"),
        ({"LC_TERMINAL": "iTerm2"}, "iterm"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "vscode"}, None),
        ({"TERM": "xterm-kitty", "TMUX": "/tmp/tmux"}, None),
        ({"TERM_PROGRAM": "iTerm.app", "STY": "1.a"}, None),
        ({"TERM": "xterm-kitty", "CI": "true"}, None),
        ({}, None),
    ],
)
def test_the_variables_say_how(variables: dict[str, str], expected: Protocol | None) -> None:
    assert protocol_of(variables) == expected


def test_nothing_is_drawn_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "TMUX", "STY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-kitty")
    assert pictures_here(io.StringIO()) is None
    assert pictures_here(Terminal()) is not None


def drawn(protocol: Protocol, monkeypatch: pytest.MonkeyPatch, columns: int) -> tuple[str, str, str]:
    """What is written for a picture: before it, for itself and after it."""
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    pictures = Pictures(stream, protocol)
    pictures.clear()
    assert stream.getvalue() == ""
    pictures.show(FRAMES)
    before, rest = stream.getvalue().split("\x1b7\x1b[1B\r")
    picture, after = rest.split("\x1b8")
    assert after == ""
    stream.truncate(0), stream.seek(0)
    pictures.clear()
    pictures.clear()
    return before, picture, stream.getvalue()


def check(png: bytes) -> None:
    """It is the first, the middle and the last frame."""
    with Image.open(io.BytesIO(png)) as image:
        assert image.format == "PNG" and np.array_equal(np.asarray(image), np.hstack(FRAMES[[0, 2, 4]]))


def test_kitty(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, with one number, so that the next one replaces it; lines are made for it below."""
    before, picture, cleared = drawn("kitty", monkeypatch, 100)
    assert before == "\n" * 8 + "\x1b[8A"
    commands = re.findall(r"\x1b_G(.*?);(.*?)\x1b\\", picture)
    assert "".join(f"\x1b_G{keys};{data}\x1b\\" for keys, data in commands) == picture
    first, *others, last = (keys for keys, _ in commands)
    (number,) = re.findall(r"a=T,f=100,i=(\d+),p=1,q=2,C=1,r=8,m=1", first)
    assert {*others} == {"m=1"} and last == "m=0" and all(len(data) <= CHUNK for _, data in commands)
    check(base64.b64decode("".join(data for _, data in commands)))
    assert cleared == f"\r\x1b_Ga=d,d=I,i={number},q=2\x1b\\\x1b[J"


def test_iterm_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    before, picture, cleared = drawn("iterm", monkeypatch, 40)
    assert before == "\n" * 3 + "\x1b[3A" and cleared == "\r\x1b[J"
    keys, data = re.fullmatch(r"\x1b\]1337;File=(.*):(.*)\x07", picture).groups()  # type: ignore[union-attr]
    png = base64.b64decode(data)
    assert keys == f"inline=1;size={len(png)};height=3;preserveAspectRatio=1;doNotMoveCursor=1"
    check(png)
