"""JSON is counted before it is decoded: what is large, deep or has many items costs nothing."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from wanserve.refusal import RefusedError
from wanserve.sizes import MAX_DEPTH, MAX_ITEMS, MAX_PLAIN, check_json, is_file

FILE = base64.b64encode(bytes(range(256)) * 8000).decode()


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth > 1 else []


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": 'a "quoted" [text], {with} \\ marks' * 900},
        {"prompt": "\N{FOX FACE}" * 100_000, "negative_prompt": "\N{FOX FACE}" * 100_000},
        {"prompt": "\N{FOX FACE}" * 100_000, "image": f"data:image/png;base64,{FILE}"},
        {"image": [{"image_url": FILE}] * 4, "timesteps": [1000.0] * 10_000},
        nested(MAX_DEPTH),
    ],
    ids=["quotes", "emoji", "both", "files", "deep"],
)
def test_what_is_taken(value: Any) -> None:
    check_json(json.dumps(value).encode())
    check_json(json.dumps(value, ensure_ascii=False).encode())


def test_base64_of_clients_that_escape_it() -> None:
    text = json.dumps("\r\n".join(FILE[start : start + 76] for start in range(0, len(FILE), 76)))
    check_json(text.replace("/", "\\/").encode())


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b'{"timesteps":[' + b"{}," * 20_000_000, "too_many_items"),
        (b'{"timesteps":[' + b'"a\\\\",' * 9_000_000, "too_many_items"),
        (b"[" * 9_000_000, "too_deep"),
        (b"1" * 50_000_000, "too_large"),
        (b'{"prompt":"' + b'\\"' * 30_000_000, "too_large"),
        (b'{"prompt":"' + b"\\" * 50_000_000 + b'"}', "too_large"),
        (b'{"prompt":"' + b"A" * 20_000_000 + b'\\u0041"}', "too_large"),
        (b'{"prompt":"' + "\N{FOX FACE}".encode() + b"A" * MAX_PLAIN + b'"}', "too_large"),
        (b'{"prompt":"' + b"a text " * 9_000_000, "too_large"),
        (json.dumps([[1]] * (MAX_ITEMS // 2 + 1)).encode(), "too_many_items"),
        (json.dumps(nested(MAX_DEPTH + 1)).encode(), "too_deep"),
    ],
    ids=[
        *("objects", "strings", "brackets", "digits", "quotes", "backslashes", "an escape at the end"),
        *("wide", "words", "just too many", "just too deep"),
    ],
)
def test_what_is_refused_before_it_is_decoded(text: bytes, code: str) -> None:
    with pytest.raises(RefusedError) as caught:
        check_json(text)
    assert caught.value.code == code


def test_a_file_is_long_and_without_blanks() -> None:
    text = FILE.encode()
    assert is_file(text, 0, len(text)) and not is_file(text, 0, 100)
    assert not is_file(text + b" ", 0, len(text) + 1)
