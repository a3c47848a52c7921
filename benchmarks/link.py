"""Measures how long a start takes whose artifact is behind a link, against the link's own time for the bytes.

A web server on loopback sends no more than ``--rate`` together. A process of ``wanrun http://...`` without
any cache fetches what it reads, and then starts. Printed are, as medians,

- the moment of ready (the first step could run), from the start of the process;
- what the link takes for the same bytes alone: as many connections read the same files, and discard them;
- the same start with the files in the cache, and no server;
- the rest of the first moment over the link's time, of which 1.25 is the aim; requests, and bytes.

    PYTHONPATH=training python benchmarks/link.py [--rate 100] [--layers 10] [--repeat 3]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from checkpoints import ensure_checkpoint
from wanbuild.build import compile_artifact, convert
from wanbuild.build_options import CompileRequest
from wanbuild.conversion.convert_request import ConvertRequest

PIECE = 2**18
CONNECTIONS = 16
AIM = 1.25


class Link(ThreadingHTTPServer):
    """A folder behind a link of a limited rate.

    Attributes:
        sent: the bytes that were sent.
        files: the files that were asked for, with their ranges.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, bytes_per_second: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.rate = folder, bytes_per_second
        self.sent = 0
        self.files: list[tuple[str, str | None]] = []
        self._free, self._lock = time.monotonic(), threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def take(self, nbytes: int) -> None:
        """Waits until the link has carried so many bytes."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + nbytes / self.rate
            until = self._free
            self.sent += nbytes
        time.sleep(max(0.0, until - time.monotonic()))


class _Handler(BaseHTTPRequestHandler):
    server: Link
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.server.folder / unquote(urlsplit(self.path).path).lstrip("/")
        asked = self.headers.get("Range")
        self.server.files.append((self.path, asked))
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        size = path.stat().st_size
        start, _, end = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
        first, after = int(start), min(size, int(end) + 1 if end else size)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(after - first))
        self.end_headers()
        with path.open("rb") as file:
            file.seek(first)
            while first < after:
                piece = file.read(min(PIECE, after - first))
                self.server.take(len(piece))
                self.wfile.write(piece)
                first += len(piece)
        return None


@contextlib.contextmanager
def serving(folder: Path, rate: float) -> Iterator[Link]:
    """The link while the context lasts."""
    with Link(folder, rate) as link:
        threading.Thread(target=link.serve_forever, daemon=True).start()
        yield link
        link.shutdown()


def floor(link: Link, files: list[tuple[str, str | None]]) -> float:
    """Seconds in which as many connections as wanrun has read these ranges, and discard them."""
    waiting = list(reversed(files))

    def read() -> None:
        connection = http.client.HTTPConnection(*link.server_address[:2])
        while True:
            try:
                path, asked = waiting.pop()
            except IndexError:
                return
            connection.request("GET", path, headers={"Range": asked} if asked else {})
            connection.getresponse().read()

    started = time.monotonic()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        for _ in range(CONNECTIONS):
            pool.submit(read)
    return time.monotonic() - started


def start(artifact: str, folder: Path, cache: Path) -> float:
    """Runs wanrun for one step; returns the seconds until ready."""
    times = folder / "times.json"
    command = [sys.executable, "-m", "wanrun", artifact, "--prompt", "a cat", "--steps", "1"]
    command += ["-o", str(folder / "o.npy"), "--overwrite", "--timing-json", str(times)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return float(json.loads(times.read_text())["process_to_ready_seconds"])


def measure(artifact: Path, folder: Path, rate: float) -> dict[str, float]:
    """One start over the link without a cache, and one with it."""
    with tempfile.TemporaryDirectory(dir=folder) as cache, serving(artifact, rate) as link:
        ready = start(link.url, folder, Path(cache))
        nbytes, files = link.sent, list(link.files)
        again = start(link.url, folder, Path(cache))
        seconds = floor(link, files)
    return {
        "ready": ready,
        "link": seconds,
        "ready from the cache": again,
        "ratio": (ready - again) / seconds,
        "MB": nbytes / 1e6,
        "requests": len(files),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=100, help="of the link, in MB/s")
    parser.add_argument("--layers", type=int, default=10, help="of 1.3B's transformer")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="kept, and used again")
    options = parser.parse_args()
    with contextlib.ExitStack() as undo:
        folder = options.folder or Path(undo.enter_context(tempfile.TemporaryDirectory()))
        artifact = folder / "artifact"
        if not (artifact / "manifest.json").exists():
            checkpoint = ensure_checkpoint(folder, "1.3b", transformer_layers=options.layers)
            convert(ConvertRequest(checkpoint, artifact))
            compile_artifact(CompileRequest(artifact, ["local"], [(256, 160)], [5]), print)
        runs = [measure(artifact, folder, options.rate * 1e6) for _ in range(options.repeat)]
    for name in runs[0]:
        values = sorted(run[name] for run in runs)
        print(f"{name:<22} {statistics.median(values):10.2f}   ({values[0]:.2f} to {values[-1]:.2f})")
    median = statistics.median(run["ratio"] for run in runs)
    print(f"ratio at most {AIM}: {'met' if median <= AIM else 'missed'}")


if __name__ == "__main__":
    main()
