"""What may stand where a file or a value should: pipes, devices, links; values of another type or range."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import chdir
from pathlib import Path
from types import MappingProxyType
from typing import Any


def _socket(path: Path) -> None:
    # A socket's path is limited to about 100 bytes, so it is bound by its name in its folder.
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def _loop(path: Path) -> None:
    other = path.with_name("other-" + path.name)
    path.symlink_to(other.name)
    other.symlink_to(path.name)


def _endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


ENDLESS: Mapping[str, Callable[[Path], object]] = MappingProxyType(
    {"a pipe": os.mkfifo, "a device": lambda path: path.symlink_to("/dev/zero"), "a terabyte": _endless}
)
"""What never ends, or never comes: made at a path where nothing is."""

THINGS: Mapping[str, Callable[[Path], object]] = MappingProxyType(
    {
        **ENDLESS,
        "a folder": lambda path: path.mkdir(),
        "a socket": _socket,
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a loop of two links": _loop,
        "a link to nothing": lambda path: path.symlink_to("nothing"),
        "an empty device": lambda path: path.symlink_to("/dev/null"),
        "a link to its folder": lambda path: path.symlink_to("."),
        "an empty file": lambda path: path.touch(),
    }
)
"""All that is no file of content."""

VALUES: tuple[Any, ...] = (
    *(-1, 0, 2**31, 10**9, 2**63, 10**400, -(10**400), 1.5, -0.5, 1e308, float("nan"), float("inf")),
    *("x", "x" * 5000, "", "\x1b[2J", None, [], {}, [1, 2], [[]], [None], {"a": 1}, [10**9] * 4, [1] * 5000),
)
"""Values of another type or range than a field's."""

NAMES: tuple[str, ...] = ("../x", "/etc/passwd", "a\nb", "\u202e", "\x00", "é" * 300, "NaN", "bfloat16", "a")
"""Texts that are no name, or another field's."""

TEXTS: Mapping[str, bytes] = MappingProxyType(
    {
        "no object": b"[]",
        "a number": b"1",
        "null": b"null",
        "not JSON": b"{_class_name: 1}",
        "not UTF-8": b'{"_class_name": "\xff"}',
        "UTF-16": '{"_class_name": "x"}'.encode("utf-16"),
        "NUL bytes": bytes(100),
        "cut off": b'{"_class_name": "AutoencoderKLWan", ',
        "two objects": b"{}{}",
        "deeply nested lists": b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        "a name twice": b'{"_class_name": "a", "_class_name": "a"}',
        "an escape sequence as a name": b'{"\\u001b[2J": 1}',
        "an endless name": b'{"' + b"a" * 100_000 + b'": 1}',
        "an integer of 5000 digits": b'{"a": ' + b"1" * 5000 + b"}",
        "an HTML page": b"<!DOCTYPE html><html><body>404 Not Found</body></html>\n",
    }
)
"""Contents of a JSON file that are no object of JSON that may be read."""
