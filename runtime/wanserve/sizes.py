"""How much a JSON text holds: counted before it is decoded, since its values take many times its bytes."""

from __future__ import annotations

import re
import string
from typing import Final

from wanserve.refusal import RefusedError

MAX_PLAIN: Final = 3 << 20
"""Bytes of a request beside its files: the two longest prompts, with every character escaped."""

MAX_DEPTH: Final = 8
MAX_ITEMS: Final = 20_000
"""Of all lists and objects of a JSON text: twice the most timesteps."""

_LONG: Final = 4096
"""Bytes of a text above which it may be a file."""

_OF_FILES: Final = (string.ascii_letters + string.digits + "+/=-_:;,.\\").encode()
_ESCAPES: Final = (b"\\/", b"\\n", b"\\r")
"""That some clients write in base64."""

_STRING: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_MARK: Final = re.compile(rb'["\[\]{},]')
_BLOCK: Final = 1 << 20


def check_json(data: bytes) -> None:
    """Counts the items, the depth and the bytes of a JSON text, data: URLs and base64 apart.

    It takes as long as an accepted text has marks: a text that has more is refused there.

    Raises:
        RefusedError: if it is too large, has too many items or is too deep.
    """
    at = plain = depth = items = 0
    while (match := _MARK.search(data, at, at + MAX_PLAIN + 1)) is not None:
        mark, here = match[0], match.end()
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
        if items > MAX_ITEMS:
            raise RefusedError(f"the request has more than {MAX_ITEMS} items", code="too_many_items")
        if depth > MAX_DEPTH:
            raise RefusedError(f"the request is nested deeper than {MAX_DEPTH} levels", code="too_deep")
    check_plain(plain + max(len(data) - at, 0))


def check_plain(nbytes: int) -> None:
    """Raises RefusedError if a request has so many bytes beside its files."""
    if nbytes > MAX_PLAIN:
        most = MAX_PLAIN >> 20
        raise RefusedError(
            f"the request is too large: it has more than {most} MB beside its files",
            413,
            code="too_large",
        )


def string_end(data: bytes, start: int) -> int:
    """Returns where the string that begins here ends: at its quote, or with the text.

    Raises:
        RefusedError: if it has quotes in it, or no end, and is too large.
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
    """Whether a part of a text is long and may be a data: URL or base64: ASCII without blanks."""
    if end - start < _LONG:
        return False
    for first in range(start, end, _BLOCK):
        last = min(first + _BLOCK, end)
        block = data[first:last]
        escapes = sum(data.count(escape, first, min(last + 1, end)) for escape in _ESCAPES)
        if block.translate(None, _OF_FILES) or block.count(b"\\") != escapes:
            return False
    return True
