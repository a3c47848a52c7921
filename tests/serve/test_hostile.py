"""Requests that no client should send: each gets a 4xx of one line, and the next request is served."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from serve_client import Server, memory_bytes

pytestmark = pytest.mark.slow  # what the server takes is not seen in its tests

PROMPT = "a red fox"
BOUNDARY = "xyz"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
SECRETS = ("Traceback", 'File "', "/root", "/work", "/dev/shm", "/tmp", "site-packages", "/etc", "wanserve/")


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
WRONG: dict[str, tuple[Any, ...]] = {
    "prompt": (None, 3, [], {}, "x" * 100_001, "\ud800", True),
    "model": ("nope", 3, [], "../toy", "toy\0", "", "a" * 10_000),
    "negative_prompt": (3, [], "x" * 100_001),
    "num_steps": (0, -1, 10_001, 2**70, 1.5, "x", "", "1e999", "nan", [], {}, True, 10**400),
    "guidance_scale": ("x", "inf", "nan", 1e39, [], {}, True),
    "guidance_scale_2": (3.0, "x"),
    "boundary_ratio": (0.5, 2),
    "flow_shift": (0, -1, "x", 1e39, []),
    "solver": ("magic", 3, "", []),
    "schedule": ("x", "../../x.json", "/etc/passwd", 3, "a\nb"),
    "timesteps": ([], ["x"], [1, 2, 3], [2000], [0], "x", 5, [1e400]),
    "seed": (-2, 2**64, 1.5, "x", [1, 2], {}, ""),
    "size": ("100x100", "0x0", "96", "96x64x3", "-96x64", 96, [96, 64], "99999x99999", "96x64; rm"),
    "width": (96, "x", -1, 1.5, []),
    "num_frames": (10, 0, -9, "x", 2**40),
    "seconds": (0, -1, "x", 1e9, "nan", "inf", [], {}, 77),
    "fps": (0, -1, 1e9, "x", []),
    "num_videos": (2, 0, "x"),
    "profile": ("nope", "/etc/passwd", 3),
    "loop": ("spiral", 3),
    "format": ("exe", "../x", 3, [], "frames", "npy"),
    "image": ("/etc/passwd", "file:///etc/passwd", "http://127.0.0.1/x", data_url(png()), 3, [3]),
    "input_reference": ("gs://x/y", {"file_id": "f"}, {"image_url": "http://x"}, data_url(b"x"), {}),
    "video_path": ("/etc/passwd",),
    "output_path": ("/tmp/x",),
    "extra_body": ("{", "[]", 3, {"extra_body": {"a": 1}}, {"model": "toy"}),
    "lora": (
        *(
            {"name": "x"},
            "x",
            "x:nan",
            ":",
            "/etc/passwd",
            "../x.safetensors",
            "x" * 100_000,
            3,
            [3],
            [[]],
            True,
        ),
        *(
            {},
            {"name": 3},
            {"name": "x", "strength": 1e39},
            {"name": "\ud800"},
            {"name": "x", "path": "/etc/x"},
        ),
    ),
    "lora_name": ("x", "/etc/passwd", ["x", 3], {}, 3),
    "lora_strength": (1, "x", [], {}),
    "max_sequence_length": (226, "x"),
    "__class__": ("x",),
    "a[b]": ("x",),
    "": ("x",),
    "x" * 5000: ("y",),
}


def bodies() -> Iterator[tuple[str, bytes, str]]:
    """Name, body and content type of requests for a video."""
    for field, values in WRONG.items():
        for value in values:
            fields = {"model": "toy", "prompt": PROMPT, field: value}
            yield f"{field[:20]}={str(value)[:20]}", json.dumps(fields).encode(), "application/json"
            if field not in ("prompt", "negative_prompt", "timesteps", "") and isinstance(
                value, str | int | float
            ):
                text = str(value)[:100_000].encode(errors="replace")
                yield f"form {field[:20]}", form(*PLAIN[field == "model" :], part(field, text)), FORM
    deep: Any = 1
    for _ in range(50):
        deep = {"extra_body": deep}
    yield "deep", json.dumps({"prompt": PROMPT, "extra_body": deep}).encode(), "application/json"
    kind = "application/json"
    yield "very deep", b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", kind
    yield "many fields", json.dumps({f"f{n}": 1 for n in range(5000)}).encode(), kind
    for name, data in {
        "empty": b"",
        "cut": b'{"prompt": "x"',
        "list": b"[1]",
        "text": b"x",
        "bytes": b"\xff\xfe",
        "null": b"null",
        "nan": b'{"prompt": NaN}',
        "surrogate": b'{"prompt": "\\ud800"}',
        "huge number": b'{"seed": ' + b"9" * 10_000 + b"}",
    }.items():
        yield f"json {name}", data, kind
    for name in (
        "text/plain",
        "",
        "application/xml",
        "multipart/form-data",
        "multipart/form-data; boundary=",
    ):
        yield f"type {name}", form(*PLAIN), name
    files = {
        "text": b"hello",
        "gif": b"GIF89a",
        "png cut": png()[:30],
        "bomb": bomb(),
        "empty": b"",
        "mp4": b"\0\0\0\x18ftypisom",
    }
    for name, data in files.items():
        yield f"file {name}", form(*PLAIN, part("image", data, "x.png")), FORM
        yield f"reference {name}", form(*PLAIN, part("input_reference", data, "../../x.png")), FORM
    yield "file for a number", form(*PLAIN, part("num_steps", b"3", "x")), FORM
    yield "many files", form(*PLAIN, *[part("image", png(), "x") for _ in range(30)]), FORM
    yield "many parts", form(*[part(f"f{n}", b"x") for n in range(500)]), FORM
    yield "twice", form(*PLAIN, part("num_steps", b"3"), part("num_steps", b"4")), FORM
    yield "no name", form(*PLAIN, b"--xyz\r\nContent-Disposition: form-data\r\n\r\nx\r\n"), FORM
    yield "no disposition", form(b"--xyz\r\n\r\nx\r\n"), FORM
    yield "long header", form(b"--xyz\r\n" + b"A" * 100_000 + b": x\r\n\r\nx\r\n"), FORM
    yield "nothing but the end", b"--xyz--\r\n", FORM
    yield "no boundary in the body", b"hello" * 100, FORM
    yield "binary", bytes(range(256)) * 50, FORM
    yield "loras", form(*PLAIN, part("loras[][name]", b"a"), part("loras[][scale]", b"1")), FORM
    yield "brackets", form(*PLAIN, part("a]]b[[", b"x")), FORM
    yield "form encoded", b"prompt=x&num_steps=abc&model=toy", "application/x-www-form-urlencoded"
    for charset in ("utf-7", "nope", "utf-16"):
        yield f"charset {charset}", form(part("prompt", b"\xff\xfe")), f"{FORM}; charset={charset}"


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


def decent(server: Server, status: int, body: bytes, name: str) -> None:
    """Checks an answer, and that the server goes on."""
    assert 400 <= status < 500, (name, status, body[:300])
    text = body.decode(errors="replace")
    assert not [secret for secret in SECRETS if secret in text], (name, text[:500])
    if text.startswith("{"):
        assert "\n" not in json.loads(text)["error"]["message"], name


def test_bodies_and_paths(server: Server) -> None:
    count, before = 0, len(server.lines)
    for name, body, kind in bodies():
        answer = server.call("POST", "/v1/videos", body, **{"content-type": kind})
        decent(server, answer.status, answer.body, name)
        count += 1
    for path in PATHS:
        answer = server.call("GET", path)
        decent(server, answer.status, answer.body, path)
    for method in ("PUT", "TRACE", "CONNECT", "BREW", "PATCH", "DELETE"):
        answer = server.call(method, "/v1/videos")
        decent(server, answer.status, answer.body, method)
    for key in ("", " ", "x" * 300, "\x01"):
        body = json.dumps({"model": "toy", "prompt": PROMPT}).encode()
        lines = (
            f"idempotency-key: {key}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        raw = f"POST /v1/videos HTTP/1.1\r\nhost: {server.host}\r\n{lines}".encode() + body
        decent(server, *exchange(server, raw), f"key {key!r}")
    for origin in ("http://evil.example", "null"):
        answer = server.call("POST", "/v1/videos", {"model": "toy", "prompt": PROMPT}, origin=origin)
        decent(server, answer.status, answer.body, origin)
    for host in ("evil.example", "127.0.0.1.evil.example", "[", ""):
        decent(server, *exchange(server, f"GET / HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()), host)
    assert count + len(PATHS) + 16 >= 300
    waits = server.call("GET", "/v1/videos?status=queued,in_progress").json["data"]
    assert waits == []
    assert server.call("GET", "/readyz").status == 200
    assert not [line for line in server.lines[before:] if "Traceback" in line]


def exchange(server: Server, data: bytes, pause: float = 0.0, seconds: float = 10.0) -> tuple[int, bytes]:
    """Sends bytes, perhaps slowly, and returns the status and the body of what comes; 400 if it is closed."""
    with socket.create_connection((server.host, server.port), timeout=seconds) as connection:
        answer = b""
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(data), 100 if pause else len(data) or 1):
                connection.sendall(data[start : start + 100] if pause else data)
                time.sleep(pause)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while block := connection.recv(65536):
                answer += block
                head, _, body = answer.partition(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                if body and length and len(body) >= int(length[0].split(b":")[1]):
                    break
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 400, body


CHUNKED = "transfer-encoding: chunked\r\n\r\n"
HEAD = "POST /v1/videos HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    ("name", "data", "status"),
    [
        ("header flood", b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 30_000 + b"\r\n", 400),
        ("long header", b"GET / HTTP/1.1\r\nhost: localhost\r\na: " + b"b" * 10**6 + b"\r\n\r\n", 400),
        ("long path", b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\n\r\n", 400),
        ("no HTTP", b"hello\r\n\r\n", 400),
        ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400),
        ("two lengths", f"{HEAD}content-length: 3\r\ncontent-length: 5\r\n\r\nabc".encode(), 400),
        (
            "length and chunks",
            f"{HEAD}content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n".encode(),
            400,
        ),
        ("negative length", f"{HEAD}content-length: -3\r\n\r\n".encode(), 400),
        ("large length", f"{HEAD}content-length: 99999999999\r\n\r\n".encode(), 413),
        ("bad chunk", f"{HEAD}transfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n".encode(), 400),
        ("cut body", f"{HEAD}content-length: 300\r\n\r\n{{".encode(), 408),
        ("cut header", HEAD[:60].encode(), 400),
        ("nothing", b"", 400),
        ("smuggled", b"GET /healthz HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: xchunked\r\n\r\n", 400),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_and_slow_connections(server: Server, name: str, data: bytes, status: int) -> None:
    """The server of the tests gives a client two seconds."""
    began = time.monotonic()
    found, body = exchange(server, data)
    assert found == status, body[:200]
    assert time.monotonic() - began < 5
    assert not [secret for secret in SECRETS if secret in body.decode(errors="replace")]
    assert server.call("GET", "/healthz").status == 200


def test_an_endless_body_and_a_slow_one(server: Server) -> None:
    head = f"{HEAD.replace('application/json', FORM)}transfer-encoding: chunked\r\n\r\n".encode()
    block = b"10000\r\n" + bytes(65536) + b"\r\n"
    found, _ = exchange(server, head + block * 1100)  # 72 MB of the 64 that are taken
    assert found in (400, 413)
    began = time.monotonic()
    found, _ = exchange(server, f"{HEAD}content-length: 5000\r\n\r\n".encode() + b" " * 5000, pause=0.2)
    assert found in (400, 408) and time.monotonic() - began < 12
    assert server.call("GET", "/healthz").status == 200


@pytest.mark.slow
def test_a_client_that_does_not_read(server: Server) -> None:
    """Its connection is closed, and holds nobody up."""
    before = len(server.lines)
    with socket.create_connection((server.host, server.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            for _ in range(2000):
                connection.send(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10)
        assert server.call("GET", "/healthz").status == 200
        own, end = connection.getsockname()[1], time.monotonic() + 10
        while f"{own:04X}" in _established(server):
            assert time.monotonic() < end, "it is still open"
            time.sleep(0.1)
    assert not [line for line in server.lines[before:] if "Traceback" in line]


def _established(server: Server) -> set[str]:
    """The ports of the clients whose connections the server has open, in hexadecimal."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    near = f":{server.port:04X}"
    return {row[2].partition(":")[2] for row in rows if row[1].endswith(near) and row[3] == "01"}


def test_a_refused_body_that_never_ends(server: Server) -> None:
    """Its connection is closed although each byte of it comes in time."""
    head = b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.sendall(head)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 9:
                connection.sendall(b" ")
                time.sleep(0.1)
                connection.settimeout(0.01)
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(65536):
                        break
        assert time.monotonic() - began < 8


@pytest.mark.slow
def test_large_texts_hold_nobody_up(server: Server) -> None:
    """Names, escapes, numbers and objects of megabytes are refused in little memory; others are served."""
    many = b'{"timesteps": [' + b"{}," * 20_000_000
    bodies = [
        (b'{"model": "toy", "prompt": "x", ' + many[1:] + b"{}]}", "application/json"),
        (form(*PLAIN, part("extra_body", many + b"{}]}")), FORM),
        (json.dumps({"x" * (8 << 20): 1}).encode(), "application/json"),
        (b"prompt=" + b"%41" * (2 << 20), "application/x-www-form-urlencoded"),
        (
            json.dumps({"model": "toy", "prompt": PROMPT, "timesteps": [1.0] * 10**6}).encode(),
            "application/json",
        ),
        (b'{"model": "toy", "prompt": "x", "width": ' + b"9" * 5000 + b', "height": 64}', "application/json"),
    ]
    slowest, largest, statuses = 0.0, 0, list[int]()
    before = memory_bytes(server.process.pid)

    def send(body: bytes, kind: str) -> None:
        statuses.append(server.call("POST", "/v1/videos", body, **{"content-type": kind}).status)

    for body in bodies:
        sent = threading.Thread(target=send, args=body)
        sent.start()
        while sent.is_alive():
            began = time.monotonic()
            assert server.call("GET", "/healthz").status == 200
            slowest = max(slowest, time.monotonic() - began)
            largest = max(largest, memory_bytes(server.process.pid) - before)
    assert set(statuses) <= {400, 413}
    assert slowest < 3  # it was 4 s and more of a quiet machine
    assert largest < 300 << 20  # and 1.4 GB
    for path in ("limit=00500000", "limit=0001" + "0" * 30, "limit=" + "9" * 5000):
        assert server.call("GET", f"/v1/videos?{path}").status == 400
    assert server.call("POST", "/session", b"x" * 5000).status == 413
