"""Requests that no client should send: for a video, for a path, and what is no request."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from PIL import Image

PROMPT = "a red fox"
BOUNDARY = "xyz"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
JSON = "application/json"


class Row(NamedTuple):
    """A request for a video: its name, body and content type, the status, and the codes that may come."""

    name: str
    body: bytes
    kind: str
    codes: frozenset[str]
    status: int = 400


def png(width: int = 4, height: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def bomb() -> bytes:
    """A PNG that claims 60 000 x 60 000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(999)))
        + chunk(b"IEND", b"")
    )


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    file = f'; filename="{filename}"' if filename is not None else ""
    return (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode()
        + value
        + b"\r\n"
    )


def form(*parts: bytes, end: bytes = b"--xyz--\r\n") -> bytes:
    return b"".join(parts) + end


PLAIN = (part("model", b"toy"), part("prompt", PROMPT.encode()))

_LONG = "x" * 100_001
_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "prompt": {
        "missing_parameter": (None,),
        "wrong_type": (3, {}, True),
        "invalid_value": ([],),
        "out_of_range": (_LONG,),
        "invalid_json": ("\ud800",),
    },
    "model": {"model_not_found": ("nope", "../toy", "toy\0", "", "a" * 10_000), "wrong_type": (3, [])},
    "negative_prompt": {"wrong_type": (3,), "invalid_value": ([],), "out_of_range": (_LONG,)},
    "num_steps": {
        "out_of_range": (0, -1, 10_001, 2**70, 10**400),
        "wrong_type": (1.5, "x", "", "1e999", "nan", {}, True),
        "invalid_value": ([],),
    },
    "guidance_scale": {
        "wrong_type": ("x", {}, True),
        "out_of_range": ("inf", "nan", 1e39),
        "invalid_value": ([],),
    },
    "guidance_scale_2": {"no_effect": (3.0,), "wrong_type": ("x",)},
    "boundary_ratio": {"no_effect": (0.5,), "out_of_range": (2,)},
    "flow_shift": {"out_of_range": (0, -1, 1e39), "wrong_type": ("x",), "invalid_value": ([],)},
    "solver": {"invalid_value": ("magic", "", []), "wrong_type": (3,)},
    "schedule": {"unknown_name": ("x", "../../x.json", "/etc/passwd", "a\nb"), "wrong_type": (3,)},
    "timesteps": {
        "out_of_range": ([], [0]),
        "wrong_type": (["x"], "x", 5),
        "invalid_value": ([1, 2, 3], [2000]),
        "invalid_json": ([1e400],),
    },
    "seed": {
        "out_of_range": (-2, 2**64),
        "wrong_type": (1.5, "x", {}, ""),
        "invalid_value": ([1, 2],),
    },
    "size": {
        "unsupported": ("100x100", "99999x99999"),
        "invalid_value": ("0x0", "96", "96x64x3", "-96x64", [96, 64], "96x64; rm"),
        "wrong_type": (96,),
    },
    "width": {"invalid_value": (96, "x", -1, 1.5, [])},
    "num_frames": {"unsupported": (10, 2**40), "out_of_range": (0, -9), "wrong_type": ("x",)},
    "seconds": {"out_of_range": (0, -1, 1e9, "nan", "inf"), "wrong_type": ("x", [], {}), "not_built": (77,)},
    "fps": {"out_of_range": (0, -1, 1e9), "wrong_type": ("x",), "invalid_value": ([],)},
    "num_videos": {"not_built": (2,), "out_of_range": (0,), "wrong_type": ("x",)},
    "profile": {"unknown_name": ("nope", "/etc/passwd"), "wrong_type": (3,)},
    "loop": {"invalid_value": ("spiral",), "wrong_type": (3,)},
    "format": {"invalid_value": ("exe", "../x", 3, [], "frames", "npy")},
    "image": {
        "invalid_value": ("/etc/passwd", "file:///etc/passwd", "http://127.0.0.1/x"),
        "wrong_type": (3, [3]),
        "unsupported": (data_url(png()),),
    },
    "input_reference": {
        "invalid_value": ("gs://x/y", {"file_id": "f"}, {"image_url": "http://x"}, {}),
        "unsupported": (data_url(b"x"),),
    },
    "extra_body": {
        "invalid_value": ("{",),
        "wrong_type": ("[]", 3),
        "unknown_parameter": ({"extra_body": {"a": 1}},),
        "conflict": ({"model": "toy"},),
    },
    "lora": {
        "unknown_name": ({"name": "x"}, "x", "/etc/passwd", "../x.safetensors", "x" * 100_000),
        "unreadable": ("x:nan", ":"),
        "wrong_type": (3, [3], [[]], True),
        "invalid_value": ({}, {"name": 3}, {"name": "x", "strength": 1e39}, {"name": "x", "path": "/etc/x"}),
        "invalid_json": ({"name": "\ud800"},),
    },
    "lora_name": {"unknown_name": ("x", "/etc/passwd"), "invalid_value": (["x", 3], {}, 3)},
    "lora_strength": {"invalid_value": (1, "x", [], {})},
    "max_sequence_length": {"invalid_value": (226, "x")},
    **{
        name: {"unknown_parameter": ("x",)}
        for name in ("video_path", "output_path", "__class__", "a[b]", "", "x" * 5000)
    },
}
"""Values of each field, by the code that comes for them in JSON."""

_OTHER_IN_FORMS = {"schedule": "unknown_name", "profile": "unknown_name", "lora_name": "unknown_name"}
"""The code for a number that is a name in a form, where every value is a text."""


def _fields() -> Iterator[Row]:
    for field, values_of in _FIELDS.items():
        for code, values in values_of.items():
            for value in values:
                fields = {"model": "toy", "prompt": PROMPT, field: value}
                name = f"{field[:20]} {str(value)[:20]!r}"
                yield Row(name, json.dumps(fields).encode(), JSON, frozenset({code}))
                if field in ("prompt", "negative_prompt", "timesteps", "") or not isinstance(
                    value, str | int | float
                ):
                    continue
                body = form(*PLAIN[field == "model" :], part(field, str(value).encode(errors="replace")))
                codes = {"invalid_form"} if len(field) > 1000 else {code, *values_of}
                yield Row(f"form {name}", body, FORM, frozenset({*codes, _OTHER_IN_FORMS.get(field, code)}))


_DEEP: Any = 1
for _ in range(50):
    _DEEP = {"extra_body": _DEEP}

_BODIES: dict[str, tuple[bytes, str]] = {
    "deep": (json.dumps({"prompt": PROMPT, "extra_body": _DEEP}).encode(), "too_deep"),
    "very deep": (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "too_deep"),
    "many fields": (json.dumps({f"f{n}": 1 for n in range(5000)}).encode(), "too_many_fields"),
    "nothing": (b"", "invalid_json"),
    "cut": (b'{"prompt": "x"', "invalid_json"),
    "a list": (b"[1]", "invalid_json"),
    "text": (b"x", "invalid_json"),
    "bytes": (b"\xff\xfe", "invalid_json"),
    "null": (b"null", "invalid_json"),
    "NaN": (b'{"prompt": NaN}', "invalid_json"),
    "half a surrogate pair": (b'{"prompt": "\\ud800"}', "invalid_json"),
    "a huge number": (b'{"seed": ' + b"9" * 10_000 + b"}", "invalid_json"),
}
_FILES: dict[str, tuple[bytes, str]] = {
    "text": (b"hello", "unsupported"),
    "gif": (b"GIF89a", "unsupported"),
    "png cut": (png()[:30], "unsupported"),
    "bomb": (bomb(), "unsupported"),
    "nothing": (b"", "invalid_value"),
    "mp4": (b"\0\0\0\x18ftypisom", "unsupported"),
}
_NUMBER = part("num_steps", b"3")
_FORMS: dict[str, tuple[bytes, str]] = {
    "a file for a number": (form(*PLAIN, part("num_steps", b"3", "x")), "unknown_parameter"),
    "many files": (form(*PLAIN, *[part("image", png(), "x") for _ in range(30)]), "invalid_form"),
    "many parts": (form(*[part(f"f{n}", b"x") for n in range(500)]), "invalid_form"),
    "twice": (form(*PLAIN, _NUMBER, part("num_steps", b"4")), "invalid_value"),
    "no name": (form(*PLAIN, b"--xyz\r\nContent-Disposition: form-data\r\n\r\nx\r\n"), "invalid_form"),
    "no disposition": (form(b"--xyz\r\n\r\nx\r\n"), "invalid_form"),
    "a long header": (form(b"--xyz\r\n" + b"A" * 100_000 + b": x\r\n\r\nx\r\n"), "invalid_form"),
    "nothing but the end": (b"--xyz--\r\n", "missing_parameter"),
    "no boundary in the body": (b"hello" * 100, "invalid_form"),
    "bytes": (bytes(range(256)) * 50, "invalid_form"),
    "lists of LoRAs": (
        form(*PLAIN, part("loras[][name]", b"a"), part("loras[][scale]", b"1")),
        "invalid_value",
    ),
    "brackets": (form(*PLAIN, part("a]]b[[", b"x")), "unknown_parameter"),
}


def _bodies() -> Iterator[Row]:
    for name, (body, code) in _BODIES.items():
        yield Row(f"JSON of {name}", body, JSON, frozenset({code}))
    for kind in ("text/plain", "", "application/xml"):
        yield Row(f"type {kind}", form(*PLAIN), kind, frozenset({"unsupported_media_type"}), 415)
    for kind in ("multipart/form-data", "multipart/form-data; boundary="):
        yield Row(f"type {kind}", form(*PLAIN), kind, frozenset({"invalid_form"}))
    for name, (data, code) in _FILES.items():
        for field, file in (("image", "x.png"), ("input_reference", "../../x.png")):
            body = form(*PLAIN, part(field, data, file))
            yield Row(f"{field} of {name}", body, FORM, frozenset({code}))
    for name, (body, code) in _FORMS.items():
        yield Row(f"a form of {name}", body, FORM, frozenset({code}))
    encoded = b"prompt=x&num_steps=abc&model=toy"
    yield Row("form encoded", encoded, "application/x-www-form-urlencoded", frozenset({"wrong_type"}))
    for charset in ("utf-7", "nope", "utf-16"):
        body = form(part("prompt", b"\xff\xfe"))
        yield Row(f"charset {charset}", body, f"{FORM}; charset={charset}", frozenset({"invalid_form"}))


ROWS: tuple[Row, ...] = (*_fields(), *_bodies())

PATHS = (
    "/../../etc/passwd",
    "/page/../service.py",
    "/page/..%2f..%2fservice.py",
    "/page/%2e%2e/%2e%2e/etc/passwd",
    "/page/nothing.js",
    "/page//etc/passwd",
    "/v1/videos/../../etc/passwd",
    "/v1/videos/%00",
    "/v1/videos/video_0",
    "/v1/videos/video_0/content",
    "/v1/videos/video_0/events",
    "/v1/videos/video_0/media/image/0",
    "/v1/videos/..%2f..%2fjobs.sqlite3/content",
    "/v1/models/nope",
    "/v1/models/..%2f",
    "/v2/videos",
    "/v1",
    "/%ff",
    "/v1/videos?limit=-1",
    "/v1/videos?limit=1e9",
    "/v1/videos?limit=" + "9" * 5000,
    "/v1/videos?order=',--",
    "/v1/videos?status=%27%20OR%201=1",
    "/v1/videos?after=%27%20OR%201=1--",
    "/v1/videos?after=" + "x" * 5000,
)
"""Paths that nobody should ask for."""

HEAD = "POST /v1/videos HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CONNECTIONS: dict[str, tuple[bytes, int]] = {
    "header flood": (b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 30_000 + b"\r\n", 400),
    "long header": (b"GET / HTTP/1.1\r\nhost: localhost\r\na: " + b"b" * 10**6 + b"\r\n\r\n", 400),
    "long path": (b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\n\r\n", 400),
    "no HTTP": (b"hello\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400),
    "two lengths": (f"{HEAD}content-length: 3\r\ncontent-length: 5\r\n\r\nabc".encode(), 400),
    "length and chunks": (
        f"{HEAD}content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n".encode(),
        400,
    ),
    "negative length": (f"{HEAD}content-length: -3\r\n\r\n".encode(), 400),
    "large length": (f"{HEAD}content-length: 99999999999\r\n\r\n".encode(), 413),
    "bad chunk": (f"{HEAD}transfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n".encode(), 400),
    "cut body": (f"{HEAD}content-length: 300\r\n\r\n{{".encode(), 408),
    "cut header": (HEAD[:60].encode(), 400),
    "nothing": (b"", 400),
    "smuggled": (b"GET /healthz HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: xchunked\r\n\r\n", 400),
}
"""What is sent to a socket, and the status."""
