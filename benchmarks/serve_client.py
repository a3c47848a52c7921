"""A started ``wanrun serve``, and a client that takes little of the machine: for measurements and tests."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ENDED = ("completed", "failed", "cancelled")


class Server:
    """A server in a process of its own.

    Args:
        data: its folder of jobs.
        artifacts: what it serves, and further options.
    """

    def __init__(self, data: Path, *artifacts: object) -> None:
        command = [sys.executable, "-m", "wancli", "serve", *map(str, artifacts), "--data", str(data)]
        if "--port" not in command:
            command += ["--port", "0"]
        self.began = time.monotonic()
        self.lines: list[str] = []
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self._served = threading.Event()
        self.host, self.port = "", 0
        threading.Thread(target=self._read, daemon=True).start()
        if not self._served.wait(60) or not self.port:
            self.end(signal.SIGKILL)
            raise AssertionError("the server has not started: " + "\n".join(self.lines))

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.lines.append(line.decode(errors="replace").rstrip())
                if (match := re.search(r"^serving .* at (\S+)$", self.lines[-1])) is not None:
                    url = urlsplit(match[1])
                    self.host, self.port = str(url.hostname), int(url.port or 0)
                    self._served.set()
        self._served.set()

    @property
    def url(self) -> str:
        """Where it answers, without a slash at the end."""
        return f"http://{self.host}:{self.port}"

    @property
    def workers(self) -> list[int]:
        """The numbers of its workers' processes."""
        folder = Path(f"/proc/{self.process.pid}/task")
        children = [child for file in folder.glob("*/children") for child in file.read_text().split()]
        return [pid for pid in map(int, children) if b"wanserve.worker" in _command(pid)]

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Sends a request over a connection of its own; for a body see ``encoded``."""
        data, given = encoded(body, headers)
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, path, data, given)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())

    def ready(self, seconds: float = 60) -> float:
        """Waits until a first step could run; returns the seconds since the process was started."""
        while time.monotonic() - self.began < seconds:
            with contextlib.suppress(OSError):
                if self.call("GET", "/readyz").status == 200:
                    return time.monotonic() - self.began
            time.sleep(0.005)
        raise AssertionError("the server is not ready: " + "\n".join(self.lines))

    def look(self, id: str) -> dict[str, Any]:
        """Returns a job."""
        return dict(self.call("GET", f"/v1/videos/{id}").json)

    def until(self, id: str, *states: str, steps: bool = False, seconds: float = 60) -> dict[str, Any]:
        """Returns a job once it has one of these states, and with ``steps`` has made one."""
        end = time.monotonic() + seconds
        while (job := self.look(id))["status"] not in states or (steps and not job["step"]):
            assert time.monotonic() < end and job["status"] not in ENDED, job
            time.sleep(0.01)
        return job

    def ended(self, id: str) -> dict[str, Any]:
        """Returns a job once it has ended."""
        return self.until(id, *ENDED)

    def running(self, id: str) -> dict[str, Any]:
        """Returns a job once it makes steps."""
        return self.until(id, "in_progress", steps=True)

    def end(self, number: int = signal.SIGTERM, seconds: float = 60) -> int:
        """Sends a signal, and returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return self.process.wait(seconds)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def served(data: Path, *artifacts: object) -> Iterator[Server]:
    """Runs a server while the block runs, and waits until it is ready."""
    server = Server(data, *artifacts)
    try:
        server.ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


class Answer:
    """An answer.

    Attributes:
        status: of HTTP.
        headers: by lower-case name.
        body: its bytes.
    """

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Connection:
    """A connection that is kept open for one request after the other."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Sends a request; for a body see ``encoded``. A closed connection is opened again."""
        data, given = encoded(body, {"host": f"{self._host}:{self._port}", **(headers or {})})
        given["content-length"] = str(len(data))
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
        try:
            return await self._exchange("\r\n".join(lines).encode() + data, method)
        except (ConnectionError, asyncio.IncompleteReadError):
            if self._streams is None or method not in ("GET", "HEAD"):
                raise
            self.close()
            return await self._exchange("\r\n".join(lines).encode() + data, method)

    async def _exchange(self, data: bytes, method: str) -> Answer:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(data)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in head[1:])
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        body = b""
        if method != "HEAD" and (length := int(headers.get("content-length", "0"))):
            body = await reader.readexactly(length)
        if headers.get("connection") == "close":
            self.close()
        return Answer(int(head[0].split()[1]), headers, body)

    def close(self) -> None:
        """Closes the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def encoded(body: Any, headers: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
    """Returns the bytes of a body, and the headers; what is neither bytes nor None becomes JSON."""
    if body is None or isinstance(body, bytes):
        return body or b"", dict(headers)
    return json.dumps(body).encode(), {**headers, "content-type": "application/json"}


async def events(host: str, port: int, path: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yields the server-sent events of a stream up to its end."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n".encode())
    name = ""
    async for line in reader:
        key, _, value = line.decode().strip().partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            yield name, json.loads(value)
    writer.close()


def memory_bytes(pid: int) -> int:
    """The resident memory of a process."""
    with Path(f"/proc/{pid}/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
