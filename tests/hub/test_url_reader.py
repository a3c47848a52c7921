"""Servers that nobody should ask: without an end, silent, slow, and with redirects that lead nowhere."""

from __future__ import annotations

import gzip
import os
import re
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from helpers.hub_server import Hub, serve
from helpers.refusals import refuses
from wanhub import opening, remote_files, url_reader
from wanhub.address import UnreachableError, parse_address
from wanhub.opening import open_copy
from wanhub.remote_files import RemoteFiles, resolved
from wanrun.codes import ErrorCode
from wanrun.errors import ArtifactError

WAIT = 0.02
"""Of tests about silence, s; the others wait as long as a run does, also on a busy machine."""

PACKED = gzip.compress(bytes(2**24))
KEY = "of-nobody-else"
REDIRECTS = (
    *("/redirect/0", f"http://[x?key={KEY}", f"http://host:999999/?key={KEY}", f"ftp://host/?key={KEY}"),
    f"//me:{KEY}@host:9x/y",
)


class Handler(BaseHTTPRequestHandler):
    server: Strange

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        kind, number = self.path.split("?")[0].strip("/").split("/")[:2]
        self.send_response(302 if kind == "redirect" else 200)
        if kind == "redirect":
            self.send_header("Location", REDIRECTS[int(number)])
        if kind == "packed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if kind == "packed":
            self.wfile.write(PACKED)
        elif kind == "whole":
            self.wfile.write(bytes(range(100)))
        elif kind == "silent":
            self.server.closing.wait(10)
        while kind in ("endless", "drip", "slow") and not self.server.closing.is_set():
            try:
                self.server.given += self.wfile.write(b" " * {"endless": 2**16, "drip": 1, "slow": 500}[kind])
            except OSError:
                return
            self.server.closing.wait({"endless": 0, "drip": WAIT, "slow": 0.25 * WAIT}[kind])


class Strange(Hub):
    """A server of such addresses."""

    def __init__(self) -> None:
        super().__init__(Handler)  # type: ignore[arg-type]
        self.given = 0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Strange]:
    monkeypatch.setattr(url_reader, "RETRY_SECONDS", (0.0,))
    with serve(Strange) as hub:
        yield hub


@pytest.mark.parametrize("number", range(len(REDIRECTS)))
def test_redirects_that_lead_nowhere(server: Strange, tmp_path: Path, number: int) -> None:
    found = "redirects without end" if number == 0 else "invalid URL"
    with refuses("not_found", ArtifactError, what="manifest.json", found=found) as raised:
        open_copy(f"{server.url}/redirect/{number}?key={KEY}", tmp_path, lambda line: None)
    said = str(raised.value)
    assert KEY not in said and "HTTP 0" not in said and str(tmp_path) not in said


def test_an_answer_has_an_end(server: Strange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bytes; nothing is unpacked that nobody asked to be packed."""
    monkeypatch.setattr(opening, "MAX_MANIFEST_BYTES", 2**18)
    with refuses("too_large", ArtifactError, what="manifest.json", expected=2**18):
        open_copy(f"{server.url}/endless/1", tmp_path, lambda line: None)
    with refuses("unreadable", ArtifactError, what="manifest.json"):
        open_copy(f"{server.url}/packed/1", tmp_path, lambda line: None)
    assert server.given < 2**24
    before = server.given
    assert len(RemoteFiles(parse_address(f"{server.url}/endless/1")).read("a", 10, 70_000)) == 69_990
    assert server.given - before < 2**24


@pytest.mark.parametrize(
    ("kind", "came", "small"),
    [("silent", "no bytes", 60), ("drip", r"\d+ bytes?", 60), ("slow", r"\d+ bytes", 12 * WAIT)],
)
def test_a_wait_has_an_end_and_says_what_it_waits_for(
    server: Strange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, came: str, small: float
) -> None:
    monkeypatch.setattr(url_reader, "WAIT_SECONDS", WAIT)
    monkeypatch.setattr(remote_files, "SMALL_SECONDS", small)
    lines, address = list[str](), f"{server.url}/{kind}/1"

    def told(line: str) -> None:
        lines.append(line)
        if came != "no bytes" and "no bytes" in line:  # a busy machine has not come to its first byte
            time.sleep(0.2)

    begun = time.monotonic()
    with refuses("unreachable", UnreachableError, what="manifest.json") as raised:
        open_copy(address, tmp_path, told)
    assert re.match(rf"{came} in \d+ s", str(raised.value.found))
    assert time.monotonic() - begun < 8  # the server would wait for 10 s
    assert len(lines) == 6 if kind == "silent" else 1 <= len(lines) <= 12
    assert lines[0].startswith(f"waiting: manifest.json of {address}, ")


def test_the_hub_is_bounded_too(server: Strange, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(remote_files, "MAX_ANSWER_BYTES", 2**18)
    codes: dict[str, ErrorCode] = {"endless": "unreadable", "drip": "unreachable"}
    for kind, code in codes.items():
        monkeypatch.setattr(constants, "ENDPOINT", f"{server.url}/{kind}/1")
        with refuses(code, ArtifactError, what="hf://me/wan"):
            resolved(parse_address("hf://me/wan"))
        monkeypatch.setattr(url_reader, "WAIT_SECONDS", WAIT)  # of the second


def test_a_server_that_knows_no_ranges(server: Strange) -> None:
    """What came before is not taken for the rest."""
    whole = RemoteFiles(parse_address(f"{server.url}/whole/1"))
    assert whole.read("a", 0, 200) == bytes(range(100)) and whole.read("a", 40, 50) == bytes(range(40, 50))
    assert whole.read("a", 90, 200) == bytes(range(90, 100)) and whole.read("a", 100, 200) == b""
    assert (whole.requests, whole.nbytes) == (4, 120)


def test_a_folder_with_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    with refuses("not_found", ArtifactError, what="manifest.json of file://", found="not a file"):
        open_copy(f"file://{tmp_path}", tmp_path / "cache", lambda line: None)
