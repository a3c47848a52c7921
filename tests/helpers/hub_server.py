"""A small Hugging Face hub on loopback: a model's metadata, its files by range, and the ways they fail.

It offers Xet for every large file, as the real one does, and does not have it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin", "tokenizer.json")
"""Endings of the files that git keeps elsewhere."""


@dataclass(frozen=True)
class Request:
    """A request for a file.

    Args:
        method: HEAD or GET.
        name: the file's name in the repository.
        range: the Range header, or None.
        token: the Authorization header, or None.
        at_content: whether it went to the content network, where a large file's bytes are.
    """

    method: str
    name: str
    range: str | None
    token: str | None
    at_content: bool


@dataclass
class Repository:
    """A repository, and how it fails.

    Args:
        commits: the content of every file, by commit.
        branches: commit by branch or tag.
        token: the token that may read the files; None if all may.
        faults: by file name (``api`` for the metadata) what becomes of the next answers, one each: ``status``
            and an HTTP status; ``damage`` and the byte of which a bit is turned; ``slow`` and how many
            bytes are sent in 0.1 s; or ``cut``, ``reset`` or ``stall`` and after how many bytes the
            connection is closed, reset or falls silent.
        headers: by file name, headers that its answers have instead of the true ones.
    """

    commits: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    faults: dict[str, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))
    headers: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Adds a commit to a branch and returns its name."""
        listing = "".join(
            f"{name} {hashlib.sha1(data).hexdigest()}\n" for name, data in sorted(files.items())
        )
        name = hashlib.sha1(listing.encode()).hexdigest()
        self.commits[name], self.branches[branch] = dict(files), name
        return name


def read_folder(folder: Path) -> dict[str, bytes]:
    """The content of every file of a folder, by relative name."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Hub(ThreadingHTTPServer):
    """The server. Large files are redirected to another host's name, as to the hub's content network.

    Attributes:
        repositories: by id.
        requests: those for files, in order.
        listings: how often a repository's metadata or list of files was asked for.
        sent: the bytes of answers that were not broken off.
        silent: whether no request is answered.
    """

    daemon_threads = True

    def __init__(self, handler: type[Handler] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.listings, self.sent = 0, 0
        self.silent = False
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def content_url(self) -> str:
        return f"http://localhost:{self.server_address[1]}/content"

    @property
    def names(self) -> set[str]:
        """Names of the files that were asked for."""
        return {request.name for request in self.requests}

    def ranges(self, name: str) -> list[str | None]:
        """The ranges of a large file that were asked for, in order."""
        return [request.range for request in self.requests if request.name == name and request.at_content]

    def forget(self) -> None:
        """Starts counting again."""
        self.requests, self.listings, self.sent = [], 0, 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a client that goes away is part of the tests."""


@contextlib.contextmanager
def serve(kind: type[Hub] | None = None) -> Iterator[Any]:
    """A hub, of this kind, that answers while the context lasts."""
    with (kind or Hub)() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.closing.set()
            hub.shutdown()
            thread.join()


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is a head and a body, and would wait for an acknowledgement

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        if self.server.silent:
            self.server.closing.wait(20)
            self.close_connection = True
            return None
        path = unquote(urlsplit(self.path).path)
        owner, _, rest = path.removeprefix("/content").removeprefix("/api/models").lstrip("/").partition("/")
        repository_name, _, rest = rest.partition("/")
        repository = self.server.repositories.get(f"{owner}/{repository_name}")
        if repository is None:
            return self.fail(404, "RepoNotFound")
        kind, _, rest = rest.partition("/")
        if path.startswith("/api/"):
            self.server.listings += 1
            revision = unquote(rest).rstrip("/") or "main"
            return self._list(f"{owner}/{repository_name}", repository, revision, kind == "tree")
        revision, _, name = rest.partition("/")
        commit = repository.branches.get(revision, revision)
        return self._file(f"{owner}/{repository_name}", repository, commit, name, kind == "resolve")

    def _list(self, repository_id: str, repository: Repository, revision: str, tree: bool) -> None:
        commit = repository.branches.get(revision, revision)
        if repository.faults["api"]:
            return self.fail(repository.faults["api"].pop(0)[1])
        if commit not in repository.commits:
            return self.fail(404, "RevisionNotFound")
        listed = [_listed(name, data) for name, data in sorted(repository.commits[commit].items())]
        siblings = [
            {"rfilename": file["path"], "size": file["size"], "blobId": file["oid"]} for file in listed
        ]
        info = {"id": repository_id, "sha": commit, "siblings": siblings}
        body = json.dumps(listed if tree else info).encode()
        return self.send(200, body, {"Content-Type": "application/json"})

    def _file(self, repository_id: str, repository: Repository, commit: str, name: str, hub: bool) -> None:
        token = self.headers.get("Authorization")
        self.server.requests.append(Request(self.command, name, self.headers.get("Range"), token, not hub))
        if hub and repository.token and token != f"Bearer {repository.token}":
            return self.fail(401 if token is None else 403, "GatedRepo")
        data = repository.commits.get(commit, {}).get(name)
        if data is None:
            return self.fail(404, "EntryNotFound")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_blob(name, data)}"'}
        headers |= repository.headers.get(name, {})
        if hub and name.endswith(LARGE):
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(data))}
            headers |= {"X-Xet-Hash": "0" * 64, "X-Xet-Refresh-Route": f"{self.server.url}/xet"}
            headers["Location"] = f"{self.server.content_url}/{repository_id}/content/{commit}/{name}"
            return self.send(302, b"", headers)
        return self._content(repository, name, data, headers)

    def _content(self, repository: Repository, name: str, data: bytes, headers: dict[str, str]) -> None:
        start, status = 0, 200
        whole, end = len(data), len(data)
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, status = int(first), 206
            end = min(whole, int(last) + 1) if last else whole
            if start >= whole:
                return self.send(416, b"", {"Content-Range": f"bytes */{whole}"})
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{whole}"
        data = data[:end]
        if self.command == "HEAD" or not repository.faults[name]:
            return self.send(status, data[start:], headers)
        fault, value = repository.faults[name].pop(0)
        if fault == "status":
            return self.fail(value)
        if fault == "damage":
            damaged = data[:value] + bytes([data[value] ^ 1]) + data[value + 1 :]
            return self.send(status, damaged[start:], headers)
        return self._break_off(fault, status, data[start:], headers, value)

    def _break_off(self, fault: str, status: int, body: bytes, headers: dict[str, str], limit: int) -> None:
        self._head(status, len(body), headers)
        for start in range(0, len(body), limit) if fault == "slow" else (0,):
            self.wfile.write(body[start : start + limit])
            self.server.closing.wait(0.1 if fault == "slow" else 0)
        self.wfile.flush()
        self.close_connection = True
        if fault == "stall":
            self.server.closing.wait(20)
        if fault == "reset":
            self.server.closing.wait(0.1)  # so that what was sent is read before the reset discards it
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def _head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._head(status, len(body), headers)
        if self.command != "HEAD":
            self.server.sent += len(body)
            self.wfile.write(body)

    def fail(self, status: int, code: str | None = None) -> None:
        self.send(status, b"", {"X-Error-Code": code} if code else {})


def _blob(name: str, data: bytes) -> str:
    if name.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _listed(name: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": _blob("", data)}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": _blob(name, data), "size": len(data), "pointerSize": 130}
        entry["xetHash"] = "0" * 64
    return entry
