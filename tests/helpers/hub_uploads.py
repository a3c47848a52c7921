"""A small Hugging Face hub that takes uploads: large files by digest, and commits that are whole or not."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from typing import Any

from helpers.hub_server import Handler, Hub, Repository

LARGEST_REGULAR = 1000
"""Of files without a known ending, in bytes; the real hub looks for text."""


class UploadHub(Hub):
    """A hub that takes uploads.

    Attributes:
        objects: the content of large files by sha256, also of those in no commit yet.
        calls: the kind of each request that changes something, in order.
        received: the bytes of large files that came whole.
        puts: the digest of each of them, in order.
        cut_after: how many bytes of requests are still read before connections are closed; None: all.
        private: the repositories that were made private.
    """

    def __init__(self) -> None:
        super().__init__(UploadHandler)
        self.objects: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.received = 0
        self.puts: list[str] = []
        self.cut_after: int | None = None
        self.private: set[str] = set()
        self.lock = threading.Lock()

    def head(self, name: str) -> str:
        """The commit of a repository's main branch."""
        return self.repositories[name].branches["main"]

    def files(self, name: str) -> dict[str, bytes]:
        """The files of a repository's main branch."""
        repository = self.repositories[name]
        return dict(repository.commits[repository.branches["main"]])


class _CutError(Exception):
    """The connection is closed in the middle of a request."""


class UploadHandler(Handler):
    server: UploadHub

    def do_POST(self) -> None:  # noqa: N802 - http.server's
        self._taken(self._post)

    def do_PUT(self) -> None:  # noqa: N802 - http.server's
        self._taken(self._put)

    def _taken(self, take: Any) -> None:
        try:
            take(self._body())
        except _CutError:
            self.close_connection = True

    def _body(self) -> bytes:
        """The request's body, which may be in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self._read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self._read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _read(self, size: int) -> bytes:
        with self.server.lock:
            if self.server.cut_after is not None:
                self.server.cut_after -= size
                if self.server.cut_after < 0:
                    raise _CutError
        return self.rfile.read(size)

    def _post(self, body: bytes) -> None:
        server, path = self.server, self.path.partition("?")[0]
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            server.calls.append("create")
            with server.lock:
                if name in server.repositories:
                    return self.answer({"url": f"{server.url}/{name}", "name": name}, 409)
                server.repositories[name] = Repository()
                server.repositories[name].commit({})
                if asked.get("private") or asked.get("visibility") == "private":
                    server.private.add(name)
            return self.answer({"url": f"{server.url}/{name}", "name": name})
        if path.endswith(".git/info/lfs/objects/batch"):
            server.calls.append("batch")
            return self.answer(
                {"transfer": "basic", "objects": [self._wanted(o) for o in json.loads(body)["objects"]]}
            )
        owner, name, kind, _ = path.removeprefix("/api/models/").split("/", 3)
        server.calls.append(kind)
        repository = server.repositories[f"{owner}/{name}"]
        if kind == "preupload":
            there = repository.commits[repository.branches["main"]]
            files = [self._mode(file, there) for file in json.loads(body)["files"]]
            return self.answer({"files": files})
        assert kind == "commit", path
        return self._commit(repository, [json.loads(line) for line in body.splitlines()])

    def _wanted(self, listed: dict[str, Any]) -> dict[str, Any]:
        if listed["oid"] in self.server.objects:
            return listed
        return {**listed, "actions": {"upload": {"href": f"{self.server.url}/lfs/{listed['oid']}"}}}

    @staticmethod
    def _mode(file: dict[str, Any], there: Any) -> dict[str, Any]:
        large = file["size"] > LARGEST_REGULAR and not file["path"].endswith((".json", ".md", ".txt"))
        found = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
        if file["path"] in there:
            data = there[file["path"]]
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            found["oid"] = hashlib.sha256(data).hexdigest() if large else blob
        return found

    def _put(self, body: bytes) -> None:
        digest = self.path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != digest:
            return self.fail(400)
        self.server.calls.append("upload")
        with self.server.lock:
            self.server.objects[digest] = body
            self.server.received += len(body)
            self.server.puts.append(digest)
        return self.send(200, b"", {})

    def _commit(self, repository: Repository, lines: list[dict[str, Any]]) -> None:
        header = lines[0]["value"]
        with self.server.lock:
            head = repository.branches["main"]
            if header.get("parentCommit") not in (None, head):
                return self.answer({"error": "the branch has moved"}, 412)
            files = dict(repository.commits[head])
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.server.objects[value["oid"]]
                else:
                    del files[value["path"]]
            oid = repository.commit(files)
        name = next(key for key, one in self.server.repositories.items() if one is repository)
        url = f"{self.server.url}/{name}/commit/{oid}"
        return self.answer({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def answer(self, value: Any, status: int = 200) -> None:
        """Sends JSON."""
        self.send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})
