"""JSON is counted before it is decoded: what is large, deep or has many items costs nothing."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from wanserve.refusal import RefusedError
from wanserve.sizes import MAX_DEPTH, MAX_ITEMS, MAX_PLAIN, check_json, is_file, plain_bytes

FILE = base64.b64encode(bytes(range(256)) * 8000).decode()


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth > 1 else []


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/", "\\/"),
        ("+", "\\u002B"),
        ("+", "\\u002b"),
        ("=", "\\u003d"),
        ("\\r\\n", " "),
        ("\\r\\n", "\\t"),
        (",", ", "),
    ],
)
def test_base64_of_clients_that_escape_or_break_it(old: str, new: str) -> None:
    url = "data:image/png;name=my%20dog (1).png;base64," + FILE
    text = json.dumps("\r\n".join(url[start : start + 76] for start in range(0, len(url), 76)))
    assert old in text
    assert check_json(text.replace(old, new).encode()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("blank", ["", "\n", "\r\n", " ", "\t"])
def test_fields_of_forms_that_are_files_or_hold_them(blank: str) -> None:
    lines = blank.join(FILE[start : start + 64] for start in range(0, len(FILE), 64))
    assert plain_bytes(lines.encode()) == 0
    assert plain_bytes(json.dumps({"image_url": f"data:image/png;base64,{lines}"}).encode()) == 15
    assert plain_bytes(json.dumps([FILE, FILE]).encode()) == 6
    for prompt in (b"[" * 5000, b"{fox} runs " * 500):
        assert plain_bytes(prompt) == len(prompt)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b'{"timesteps":[' + b"{}," * 20_000_000, "too_many_items"),
        (b'{"timesteps":[' + b'"a\\\\",' * 9_000_000, "too_many_items"),
        (b'{"extra_body":{' + b'""' * 1_000_000, "too_many_items"),
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
        *(
            "objects",
            "strings",
            "empty strings",
            "brackets",
            "digits",
            "quotes",
            "backslashes",
            "an escape at the end",
        ),
        *("wide", "words", "just too many", "just too deep"),
    ],
)
def test_what_is_refused_before_it_is_decoded(text: bytes, code: str) -> None:
    with pytest.raises(RefusedError) as caught:
        check_json(text)
    assert caught.value.code == code


def test_a_file_is_long_and_no_words() -> None:
    text = FILE.encode()
    assert is_file(text, 0, len(text)) and not is_file(text, 0, 100)
    assert not is_file(text + b"<", 0, len(text) + 1)
    words = b"as long as they are here " * 1000
    assert not is_file(words, 0, len(words))
