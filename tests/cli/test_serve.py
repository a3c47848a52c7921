"""``wanrun serve`` as a command: what it refuses to start with, how it ends, and what outlives it."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from helpers.damage import linked
from helpers.manifests import write_adapter
from helpers.refusals import check_json
from serve_client import Server, served
from wancli.serve import MOST_PIXELS, MOST_WORKERS, serve
from wanrun.codes import ErrorCode
from wanrun.errors import ArtifactError, UsageError

PROMPT = "a red fox"
LONG = 8000
KEY = "sk-0123456789abcdef"


def refused(*arguments: object, **environment: str) -> tuple[int, list[str]]:
    """The exit code and the lines of a server that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "wanrun", "serve", *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


@pytest.mark.slow
def test_a_folder_of_loras_is_looked_at_first(toy_artifact: Path, tmp_path: Path) -> None:
    code, lines = refused(toy_artifact, "--loras", tmp_path)
    assert code == 2 and "no adapters" in lines[-1]
    write_adapter(tmp_path / "style.safetensors", {})
    code, lines = refused(toy_artifact, "--loras", tmp_path)
    assert code == 2 and "--lora-rank" in lines[-1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers over one folder, which end with the test."""
    servers = list[Server]()

    def begin(*arguments: object) -> Server:
        servers.append(Server(tmp_path / "data", *arguments))
        return servers[-1]

    yield begin
    for server in servers:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


def ask(server: Server, **fields: Any) -> str:
    answer = server.call("POST", "/v1/videos", {"prompt": PROMPT, "num_steps": 2, **fields})
    assert answer.status == 200, answer.body
    return str(answer.json["id"])


def content(server: Server, id: str) -> bytes:
    answer = server.call("GET", f"/v1/videos/{id}/content")
    assert answer.status == 200, answer.body
    return answer.body


@pytest.mark.thorough
def test_what_does_not_start(toy_artifact: Path, tmp_path: Path) -> None:
    """One line each, with the exit codes of wanrun, and nothing is left running."""
    toy, empty, file = toy_artifact, tmp_path / "empty", tmp_path / "file"
    empty.mkdir()
    file.write_text("alice short")
    file.chmod(0o600)
    data = ("--data", tmp_path / "data", "--port", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases: list[tuple[int, ErrorCode, object, tuple[object, ...]]] = [
            (3, "missing_file", "no such folder", (tmp_path / "none", *data)),
            (3, "wrong_kind", "manifest.json", (empty, *data)),
            (2, "conflict", "NAME=DIR", (f"a={toy}", f"a={toy}", *data)),
            (2, "busy", port, (toy, "--port", port)),
            (2, "busy", "nowhere.invalid", (toy, *data, "--host", "nowhere.invalid")),
            (2, "out_of_range", file, (toy, *data, "--keys", file)),
            (2, "conflict", "--tls-certificate", (toy, *data, "--tls-key", file)),
            (2, "unreadable", "TLS", (toy, *data, "--tls-key", file, "--tls-certificate", file)),
            (2, "unwritable", file / "x", (toy, "--data", file / "x", "--port", 0)),
            (3, "not_built", "v5e", (toy, *data, "--target", "v5e")),
            (2, "invalid_value", "--cors", (toy, *data, "--cors", "*")),
        ]
        for code, error, named, arguments in cases:
            found, lines = refused(*arguments, "--json-errors")
            check_json(lines[-1], error, message=named, exit_code=code)
            assert found == code and not [line for line in lines if "Traceback" in line]


@pytest.mark.parametrize(("option", "most"), [("--max-pixels", MOST_PIXELS), ("--workers", MOST_WORKERS)])
def test_numbers_that_the_system_would_not_take(tmp_path: Path, option: str, most: int) -> None:
    for number, told in ((most, "is not an artifact"), (most + 1, f"{most + 1} is not in the range")):
        with pytest.raises((click.BadParameter, ArtifactError), match=told):
            serve.main([str(tmp_path / "none"), option, str(number)], standalone_mode=False)


@pytest.mark.parametrize("options", [["--build", "--require-signature", "key"], ["--build-limit", "9"]])
def test_what_is_not_built_for_requests(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "key").touch()
    given = [str(tmp_path / one) if one == "key" else one for one in options]
    with pytest.raises(UsageError, match="--build") as refused:
        serve.main([str(tmp_path), *given], standalone_mode=False)
    assert refused.value.remedy is not None


def test_without_the_extra(toy_artifact: Path, tmp_path: Path) -> None:
    """One line says what is missing."""
    (tmp_path / "starlette.py").write_text("raise ModuleNotFoundError('No module', name='starlette')")
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    code, lines = refused(toy_artifact, "--data", tmp_path / "data", PYTHONPATH=path)
    assert code == 2 and " starlette; " in lines[-1] and "pip install '.[serve]'" in lines[-1]


@pytest.mark.thorough
def test_sigterm_lets_the_running_job_end(toy_artifact: Path, tmp_path: Path) -> None:
    """It takes no new jobs meanwhile, and the waiting one is made after the next start."""
    with served(tmp_path / "data", toy_artifact) as server:
        running, waiting = ask(server, num_steps=1000), ask(server, seed=3)
        server.running(running)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.call("POST", "/v1/videos", {"prompt": PROMPT}).status == 503
        assert server.call("GET", "/readyz").status == 503
        assert server.look(waiting)["status"] == "queued"
        assert server.process.wait(60) == 0
    with served(tmp_path / "data", toy_artifact) as server:
        assert server.look(running)["attempts"] == 1 and server.look(running)["status"] == "completed"
        server.until(waiting, "completed")


@pytest.mark.thorough
def test_what_runs_too_long_waits_for_the_next_start(toy_artifact: Path, tmp_path: Path) -> None:
    with served(tmp_path / "data", toy_artifact, "--grace", 0.2) as server:
        id = ask(server, num_steps=LONG)
        server.running(id)
        began = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began < 5
    with served(tmp_path / "data", toy_artifact) as server:
        assert server.running(id)["attempts"] == 1  # the one before does not count
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        began = time.monotonic()
        assert server.end(signal.SIGINT) == 0  # the second one hurries it
        assert time.monotonic() - began < 5


@pytest.mark.thorough
def test_kill_minus_nine(toy_artifact: Path, start: Callable[..., Server]) -> None:
    """Of the server and of its worker: every job ends once, with the bytes that it would have had."""
    jobs, server = list[str](), start(toy_artifact)
    port = server.port
    for pause in (0.0, 0.3, 0.9):
        jobs += [ask(server, seed=seed, num_steps=150) for seed in (1, 2)]
        time.sleep(pause)
        server.end(signal.SIGKILL)
        server = start(toy_artifact, "--port", port)
    server.ready()
    jobs.append(ask(server, seed=1, num_steps=LONG))
    server.until(jobs[-1], "in_progress", steps=True, seconds=120)
    (worker,) = server.workers
    os.kill(worker, signal.SIGKILL)
    while server.look(jobs[-1])["attempts"] < 2:
        assert server.look(jobs[-1])["status"] in ("queued", "in_progress")
        time.sleep(0.02)
    server.running(jobs[-1])
    server.call("POST", f"/v1/videos/{jobs[-1]}/cancel")
    server.until(jobs.pop(), "cancelled")
    assert [server.look(id)["status"] for id in jobs] == ["completed"] * 6
    first, second = content(server, jobs[0]), content(server, jobs[1])
    assert [content(server, id) for id in jobs] == [first, second] * 3 and first != second
    listed = server.call("GET", "/v1/videos?order=asc").json["data"]
    assert [job["id"] for job in listed[:6]] == jobs
    crash = ask(server, num_steps=LONG)
    server.running(crash)
    (worker,) = server.workers
    os.kill(worker, signal.SIGSEGV)
    failed = server.until(crash, "failed")
    assert failed["error"]["code"] == "worker_died"
    assert "signal 11 " in failed["error"]["message"]
    assert server.until(ask(server), "completed")["progress"] == 100
    pids = [server.process.pid, *server.workers]
    server.end(signal.SIGKILL)
    end = time.monotonic() + 5
    while [pid for pid in pids[1:] if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, "a worker outlives its server"
        time.sleep(0.05)


@pytest.mark.thorough
def test_a_worker_that_is_killed_each_time(toy_artifact: Path, tmp_path: Path) -> None:
    """As for want of memory: its job fails after some attempts, and the next one is made."""
    with served(tmp_path / "data", toy_artifact, "--attempts", 2) as server:
        id = ask(server, num_steps=LONG)
        for attempt in (1, 2):
            job = server.running(id)
            assert job["attempts"] == attempt
            for pid in server.workers:
                os.kill(pid, signal.SIGKILL)
            while server.look(id)["step"]:
                time.sleep(0.01)
        failed = server.until(id, "failed")
        said = failed["error"]["message"]
        assert failed["error"]["code"] == "worker_died" and "signal 9 " in said and "attempt 2" in said
        server.until(ask(server), "completed")


@pytest.mark.thorough
def test_want_of_memory_and_two_workers(toy_artifact: Path, start: Callable[..., Server]) -> None:
    """Two workers make two jobs at once. One that gets no more memory fails its job; the next is made."""
    server = start(toy_artifact, "--workers", 2, "--attempts", 1)  # a worker may die before it tells
    server.ready()
    while len(server.workers) < 2 or "ready_workers 2.0" not in server.call("GET", "/metrics").body.decode():
        time.sleep(0.05)
    ids = [ask(server, num_steps=LONG) for _ in range(2)]
    for id in ids:
        server.running(id)
    for id in ids:
        server.call("POST", f"/v1/videos/{id}/cancel")
        server.until(id, "cancelled")
    for pid in server.workers:
        resource.prlimit(pid, resource.RLIMIT_DATA, (1, 1))  # reserved memory cannot be taken up either
    failed = server.until(ask(server, seed=4), "failed")
    assert failed["error"]["code"] in ("out_of_memory", "worker_died"), failed["error"]
    assert "completed" in [server.ended(ask(server, seed=4))["status"] for _ in range(2)]
    assert server.call("GET", "/healthz").status == 200


@pytest.mark.slow
def test_an_artifact_that_is_damaged_later(toy_artifact: Path, tmp_path: Path) -> None:
    """Its jobs fail with wanrun's line, without a path; those of another model are made."""
    broken = linked(toy_artifact, tmp_path / "broken")
    with served(tmp_path / "data", f"good={toy_artifact}", f"broken={broken}") as server:
        (broken / "weights").unlink()
        failed = server.until(ask(server, model="broken"), "failed")
        assert failed["error"]["code"] in ("damaged", "missing_file", "unreadable")
        assert str(tmp_path) not in json.dumps(failed)
        server.until(ask(server, model="good"), "completed")


@pytest.mark.slow
def test_pages_of_another_site(toy_artifact: Path, start: Callable[..., Server]) -> None:
    """They call the API if they are allowed to, and not otherwise."""
    site, other = "https://videos.example", "https://evil.example"
    server = start(toy_artifact, "--cors", site)
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-stainless-os"}
    answer = server.call("OPTIONS", "/v1/videos", origin=site, **asked)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, site)
    assert answer.headers["access-control-allow-headers"] == "x-stainless-os"
    answer = server.call("POST", "/v1/videos", {"prompt": PROMPT, "size": "1x1"}, origin=site)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (400, site)
    for method in ("OPTIONS", "POST"):
        answer = server.call(method, "/v1/videos", origin=other)
        assert answer.status in (403, 405) and "access-control-allow-origin" not in answer.headers


@pytest.mark.slow
def test_keys_limits_and_tls(toy_artifact: Path, start: Callable[..., Server], tmp_path: Path) -> None:
    """The options reach the server; what they do: tests/serve."""
    keys, key, certificate = tmp_path / "keys", tmp_path / "key.pem", tmp_path / "cert.pem"
    keys.write_text(f"alice {KEY}a 2\nbob {KEY}b\n")
    keys.chmod(0o600)
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    limits = ("--max-waiting", 3, "--keys", keys, "--tls-certificate", certificate, "--tls-key", key)
    server = start(toy_artifact, *limits)
    trusted = ssl.create_default_context(cafile=certificate)

    def call(method: str, path: str, body: Any = None, who: str = "a") -> tuple[int, Any, dict[str, str]]:
        data = None if body is None else json.dumps(body).encode()
        given = {"authorization": f"Bearer {KEY}{who}", "content-type": "application/json"}
        url = f"https://127.0.0.1:{server.port}{path}"
        request = urllib.request.Request(url, data, given, method=method)
        try:
            with urllib.request.urlopen(request, context=trusted) as answer:
                return answer.status, json.loads(answer.read() or b"null"), dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read()), dict(error.headers)

    assert call("GET", "/healthz", who="")[0] == 200
    for who in ("c", ""):
        status, body, _ = call("GET", "/v1/videos", who=who)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    job = {"prompt": PROMPT, "num_steps": LONG}
    ids = [call("POST", "/v1/videos", job)[1]["id"]]
    while call("GET", f"/v1/videos/{ids[0]}")[1]["status"] != "in_progress":
        time.sleep(0.05)
    ids += [call("POST", "/v1/videos", job)[1]["id"] for _ in range(2)]
    for who, most in (("a", 2), ("b", 3)):  # of a key, and of all keys
        status, body, headers = call("POST", "/v1/videos", job, who)
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert f"at most {most}" in body["error"]["message"] and int(headers["retry-after"]) >= 1
        assert who == "b" or call("POST", "/v1/videos", job, "b")[0] == 200
    assert call("GET", f"/v1/videos/{ids[1]}", who="b")[0] == 404  # another one's
    assert [one["id"] for one in call("GET", "/v1/videos")[1]["data"]] == ids[::-1]
    assert call("POST", "/session", {"key": "wrong"})[0] == 401
    status, _, headers = call("POST", "/session", {"key": f"{KEY}a"})
    cookie = headers["set-cookie"]
    assert status == 204 and "HttpOnly" in cookie and "SameSite=strict" in cookie and "Secure" in cookie


def test_every_option_has_its_line_in_the_page() -> None:
    """docs/serving.md names what ``wanrun serve --help`` does."""
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    options = {option for one in serve.params for option in one.opts if option.startswith("--")}
    assert len(options) > 20
    assert (
        sorted(option for option in options - {"--debug", "--json-errors"} if f"`{option}" not in text) == []
    )
