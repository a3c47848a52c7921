"""Faults of what is elsewhere: servers that nobody should ask, lock files, and keys."""

from __future__ import annotations

import json
import random
import shutil
import socketserver
import threading
import time
from pathlib import Path

from campaign.damage import damage_file
from campaign.fault import LIMIT_SECONDS, Call, Case
from campaign.sources import Sources

_OK = b"HTTP/1.1 200 OK\r\n"
ANSWERS: tuple[bytes, ...] = (
    _OK + b"\r\nendless",
    _OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    _OK + b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\nno gzip..",
    _OK + b"Content-Length: 2\r\n\r\n[]",
    _OK + b"X: " + b"a" * 100_000 + b"\r\n\r\n{}",
    *(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % status for status in (204, 304, 401, 403, 404, 410)),
    *(
        b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + place + b"\r\n\r\n"
        for place in (
            b"/manifest.json",
            b"http://[x?key=1",
            b"ftp://a/",
            b"file:///etc/passwd",
        )
    ),
    b"junk\r\n\r\n",
    b"HTTP/9.9 x\r\n\r\n",
)


def odd_address(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """What a server answers that is no artifact is refused in one line, soon and without much memory."""
    sample = rng.choice(sources.samples)
    file = folder / "manifest.json"
    shutil.copyfile(sample.artifact / file.name, file)
    what = damage_file(rng, file)
    answer = _OK + b"\r\n"
    if file.is_file():
        with file.open("rb") as there:
            answer += there.read(2**20)  # it may be a sparse file of any size
    if rng.randrange(4):
        answer = rng.choice(ANSWERS)
        what = repr(answer[:90])
    url = f"http://127.0.0.1:{_serve(answer)}/a?key=1"
    cache = {"XDG_CACHE_HOME": str(folder / "cache")}
    call = Call("wanrun", [url, "--list"], frozenset({0, 1, 3}), environment=cache)
    return Case("odd address", what, [call], process=True, clean=[folder])


def odd_pin(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """An address with another pin, or another manifest in its copy, runs as it was pinned, or not at all."""
    sample, lock, output = rng.choice(sources.samples), folder / "lock.json", folder / "video.npy"
    address = f"file://{sample.artifact}"
    digest = json.loads((sample.artifact / "manifest.json").read_bytes())["manifest_digest"]
    other = rng.choice(
        (str(sample.artifact), "../..", "", "sha256:0", f"sha256:{'0' * 64}", digest + " ", digest)
    )
    pin = {"revision": rng.choice(("", "", "main", "../x")), "manifest_digest": other}
    lock.write_text(json.dumps({address: pin}))
    what = json.dumps(pin)
    if rng.randrange(2):
        what = damage_file(rng, lock)
    call = sample.run(sample.artifact, output, codes=(0, 2, 3))
    arguments = [address if one == str(sample.artifact) else one for one in call.arguments]
    surroundings = {"XDG_CACHE_HOME": str(folder / "cache"), "WANRUN_LOCK": str(lock)}
    call = Call("wanrun", arguments, call.codes, output, surroundings)
    return Case("odd pin", what, [call], {sample.video}, process=True, clean=[folder])


def _serve(answer: bytes) -> int:
    """Returns the port of a server that gives each request this answer for as long as a command may take."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            try:
                self.wfile.write(answer)
                while answer.endswith(b"endless"):
                    self.wfile.write(b" " * 2**16)
            except OSError:
                pass

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.timeout = True, LIMIT_SECONDS
    end = time.monotonic() + LIMIT_SECONDS

    def answer_requests() -> None:
        with server:
            while time.monotonic() < end:
                server.handle_request()

    threading.Thread(target=answer_requests, daemon=True).start()
    return int(server.server_address[1])
