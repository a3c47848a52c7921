"""Weights behind a web server, one that fails too, and what names a place that weights can lie at."""

from __future__ import annotations

import functools
import operator
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from helpers.stored_weights import (
    Server,
    Stored,
    flip,
    parameter_of,
    read,
    read_one,
    refusal,
)
from wanrun.artifact.parameters import Parameter
from wanrun.opened.location import component_location
from wanrun.weights import tensorstore_reader as tensorstore_restore
from wanrun.weights.restore import Restore
from wanrun.weights.tensorstore_reader import TensorStoreReader


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Server]]:
    """Starts servers of folders; requests that fail are tried once more at once."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    retries = {"max_retries": 1, "initial_delay": "5ms", "max_delay": "5ms"}
    monkeypatch.setattr(tensorstore_restore, "RETRIES", retries)
    servers = []

    def start(folder: Path) -> Server:
        servers.append(Server(folder))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_weights_behind_a_web_server(stored: Stored, serve: Callable[[Path], Server]) -> None:
    component = stored.component
    server = serve(stored.artifact)
    for url in (f"{server.url}/weights", f"{server.url}/weights/"):
        location = component_location(url, component.folder)
        assert location == f"{server.url}/weights/transformer"
        server.requests.clear()
        assert read(location, component, "sha256") == stored.expected
        # One request for an array's description and one for each chunk: the first form tried is ours.
        chunks = sum(parameter.layout.chunks for parameter in component.parameters.values())
        assert len(server.requests) == len(component.parameters) + chunks


def test_the_restore_reads_from_a_web_server(
    stored: Stored, tmp_path: Path, serve: Callable[[Path], Server]
) -> None:
    server = serve(stored.artifact)
    with ThreadPoolExecutor(4) as pool:
        url = f"{server.url}/weights"
        tree = Restore(tmp_path, "transformer", stored.component, pool, "sha256", weights=url).result()
    for path, data in stored.expected.items():
        assert functools.reduce(operator.getitem, path.split("/"), tree).tobytes() == data


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_other_forms_behind_a_web_server(
    tmp_path: Path, serve: Callable[[Path], Server], use_ocdbt: bool
) -> None:
    value = np.random.default_rng(7).standard_normal((6, 30), np.float32)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as checkpointer:
        checkpointer.save(tmp_path / "model", {"stack": value, "other": value[0]})
    server = serve(tmp_path)
    location = component_location(server.url + "?key=value", "weights/model")
    assert location == f"{server.url}/model?key=value"
    for verify in ("fast", "sha256"):
        assert read_one(location, parameter_of(value, 3), verify).tobytes() == value.tobytes()
    assert server.requests and all(request.endswith("?key=value") for request in server.requests)


def _status(code: int) -> Callable[[BaseHTTPRequestHandler], bool]:
    def answer(request: BaseHTTPRequestHandler) -> bool:
        request.send_error(code)
        return True

    return answer


def _cut_off(request: BaseHTTPRequestHandler) -> bool:
    if "/c/" not in request.path:
        return False
    request.send_response(200)
    request.send_header("Content-Length", "4000")
    request.end_headers()
    request.wfile.write(b"x" * 100)
    request.close_connection = True
    return True


@pytest.mark.parametrize(
    ("answer", "found", "remedy", "most"),
    [
        (_status(404), "weights are missing: model/stack; expected an array stack at", "check --weights", 8),
        (_status(403), "found PERMISSION_DENIED: ", "credentials", 8),
        (_status(500), "found ABORTED: ", "run it again", 2),
        (_status(503), "found ABORTED: ", "run it again", 2),
        (_cut_off, "found ABORTED: ", "run it again", 3),
    ],
    ids=["404", "403", "500", "503", "cut off"],
)
def test_a_server_that_does_not_deliver(
    plain: tuple[Path, Parameter, np.ndarray],
    serve: Callable[[Path], Server],
    answer: Callable[[BaseHTTPRequestHandler], bool],
    found: str,
    remedy: str,
    most: int,
) -> None:
    location, parameter, _ = plain
    server = serve(location.parent)
    server.answer = answer
    line = refusal(f"{server.url}/model?key=hush", parameter)
    assert found in line and remedy in line and f"{server.url}/model" in line
    assert "hush" not in line  # a key in the address is nobody's business
    chunks = 3 if answer is _cut_off else 0
    assert 0 < len(server.requests) <= most + 2 * chunks


def test_a_request_that_fails_once_is_tried_again(
    plain: tuple[Path, Parameter, np.ndarray], serve: Callable[[Path], Server]
) -> None:
    location, parameter, value = plain
    server = serve(location.parent)
    failed: set[str] = set()

    def answer(request: BaseHTTPRequestHandler) -> bool:
        first = request.path not in failed
        failed.add(request.path)
        return first and _status(503)(request)

    server.answer = answer
    assert read_one(f"{server.url}/model", parameter).tobytes() == value.tobytes()
    assert len(server.requests) == 2 * len(failed) == 8


def test_a_flipped_byte_on_the_way(
    plain: tuple[Path, Parameter, np.ndarray], serve: Callable[[Path], Server]
) -> None:
    location, parameter, _ = plain
    server = serve(location.parent)
    flip(location / "stack" / "c" / "0" / "0" / "0", 3)
    assert "row 0 has the wrong crc32c" in refusal(f"{server.url}/model", parameter)


def test_nobody_listens(plain: tuple[Path, Parameter, np.ndarray], serve: Callable[[Path], Server]) -> None:
    server = serve(plain[0])
    server.close()
    line = refusal(f"{server.url}/model", plain[1])
    assert "Could not connect" in line and "check the address and the network" in line
    server.close = lambda: None  # type: ignore[method-assign]


SILENT = """
import sys, time
import numpy as np, tensorstore  # before the limits are set, as a program that uses Orbax may
from wanrun.opened import location
from wanrun.weights import tensorstore_reader as tensorstore_restore
from wanrun.errors import ArtifactError
from wanrun.artifact.layout import ArrayLayout
from wanrun.artifact.parameters import Parameter

assert {"max_retries", "initial_delay", "max_delay"} == set(tensorstore_restore.RETRIES)
tensorstore_restore.RETRIES = {"max_retries": 0}
location.CURL_LIMITS["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] = "1"
parameter = Parameter(
    layout=ArrayLayout((4,), "float32", 1, 1), axes=(None,), crc32c=("00000000",), sha256=""
)
started = time.monotonic()
try:
    reader = tensorstore_restore.TensorStoreReader(sys.argv[1], "model")
    reader.read("stack", parameter, memoryview(bytearray(16)))
except ArtifactError as error:
    print(time.monotonic() - started, error)
"""


def silent(request: BaseHTTPRequestHandler) -> bool:
    time.sleep(30)  # in a daemon thread: nobody waits for it
    return True


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path, serve: Callable[[Path], Server]) -> None:
    server = serve(tmp_path)
    server.answer = silent
    done = subprocess.run(
        [sys.executable, "-c", SILENT, f"{server.url}/model"],
        # Without the limits that a reader in this process has set.
        env={name: value for name, value in os.environ.items() if not name.startswith("TENSORSTORE_")},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    seconds, _, line = done.stdout.partition(" ")
    assert 1 <= float(seconds) < 8
    assert "weights cannot be read: model/stack" in line and "check the address and the network" in line


def test_a_wait_can_be_cancelled(tmp_path: Path, serve: Callable[[Path], Server]) -> None:
    server = serve(tmp_path)
    server.answer = silent
    parameter = parameter_of(np.zeros(4, np.float32), 1)
    reader = TensorStoreReader(f"{server.url}/model", "model")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.read, "stack", parameter, memoryview(bytearray(16)))
        while not server.requests:
            time.sleep(0.01)
        started = time.monotonic()
        reader.cancel()
        with pytest.raises(CancelledError):
            reading.result(timeout=10)
        assert time.monotonic() - started < 2
