"""How much a JSON text holds: counted before it is decoded, since its values take many times its bytes."""

from __future__ import annotations

import contextlib
import re
import string
from collections.abc import Sequence
from typing import Final

from wanserve.refusal import RefusedError

MAX_PLAIN: Final = 3 << 20
"""Bytes of a request besides its files: the two longest prompts, with every character escaped."""

MAX_DEPTH: Final = 8
MAX_ITEMS: Final = 20_000
"""Of all lists and objects of a JSON text: twice the most timesteps."""

_LONG: Final = 4096
"""Bytes of a text above which it may be a file."""

_OF_FILES: Final = (string.ascii_letters + string.digits + "+/=-_:;,.\\%!'()*~&@$ \t\r\n").encode()
"""Of base64, of the parameters of a data: URL, and of their escapes in JSON."""

_BLANKS: Final = (b" ", b"\t", b"\r", b"\n", b"\\t", b"\\r", b"\\n")
_ESCAPES: Final = (
    *_BLANKS[4:],
    b"\\/",
    b"\\u002B",
    b"\\u002b",
    b"\\u002F",
    b"\\u002f",
    b"\\u003D",
    b"\\u003d",
)
"""That some clients write in base64."""

_LINE: Final = 16
"""Bytes for each blank, at least: lines of base64 have more, and words have fewer."""

_STRING: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_MARK: Final = re.compile(rb'["\[\]{},]')
_BLOCK: Final = 1 << 20


def check_json(data: bytes) -> int:
    """Checks the items, the depth and the bytes of a JSON text; returns its bytes without files.

    Files are data: URLs and base64. It takes as long as an accepted text has marks: a text that has more is
    refused there. Raises RefusedError if the text is too large, has too many items or is too deep.
    """
    at = plain = depth = items = marks = 0
    while (match := _MARK.search(data, at, at + MAX_PLAIN + 1)) is not None:
        mark, here, marks = match[0], match.end(), marks + 1
        plain += here - at
        if mark == b'"':
            end = string_end(data, here)
            plain += 0 if is_file(data, here, end) else end - here
            at = end + 1
        else:
            at = here
            depth += (mark in b"[{") - (mark in b"]}")
            items += mark in b"[{,"
        check_plain(plain)
        if items > MAX_ITEMS or marks > 8 * MAX_ITEMS:
            raise RefusedError(f"the request has more than {MAX_ITEMS} items", code="too_many_items")
        if depth > MAX_DEPTH:
            raise RefusedError(f"the request is nested deeper than {MAX_DEPTH} levels", code="too_deep")
    plain += max(len(data) - at, 0)
    check_plain(plain)
    return plain


def plain_bytes(data: bytes) -> int:
    """Returns the bytes of a form's field without files: a text, a file, or JSON that may hold files."""
    if data[:1] in (b"[", b"{"):
        with contextlib.suppress(RefusedError):  # a prompt may begin so too
            return check_json(data)
    return 0 if is_file(data, 0, len(data)) else len(data)


def check_plain(nbytes: int) -> None:
    """Raises RefusedError if a request has so many bytes besides its files."""
    if nbytes > MAX_PLAIN:
        most = MAX_PLAIN >> 20
        raise RefusedError(
            f"the request is too large: it has more than {most} MB besides its files",
            413,
            code="too_large",
        )


def string_end(data: bytes, start: int) -> int:
    """Returns where the string that begins here ends: at its quote, or with the text.

    Raises RefusedError if it has quotes in it, or no end, and is too large.
    """
    end = data.find(b'"', start)
    if end >= 0 and data[end - 1 : end] != b"\\":
        return end
    match = _STRING.match(data, start, start + MAX_PLAIN + 1)
    if match is not None:
        return match.end() - 1
    check_plain(len(data) - start)
    return len(data)


def is_file(data: bytes, start: int, end: int) -> bool:
    """Whether a part of a text is long and may be a data: URL or base64: ASCII in lines, and no words."""
    if end - start < _LONG:
        return False
    blanks = 0
    for first in range(start, end, _BLOCK):
        last = min(first + _BLOCK, end)
        block = data[first:last]
        if block.translate(None, _OF_FILES) or (
            (slashes := block.count(b"\\")) and slashes != _count(_ESCAPES, data, first, last, end)
        ):
            return False
        blanks += _count(_BLANKS, data, first, last, end)
    return blanks * _LINE <= end - start


def _count(parts: Sequence[bytes], data: bytes, first: int, last: int, end: int) -> int:
    """The number of parts of a text that begin in a block of it; the last one may end after the block."""
    return sum(data.count(part, first, min(last + len(part) - 1, end)) for part in parts)
