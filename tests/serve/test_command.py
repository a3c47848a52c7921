"""``wanrun serve`` as a command: what it refuses to start with, how it ends, and what outlives it."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from helpers.damage import linked
from serve_client import ENDED, Server, served
from wanserve.cli import serve

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


def ask(server: Server, **fields: Any) -> str:
    answer = server.call("POST", "/v1/videos", {"prompt": PROMPT, "num_steps": 2, **fields})
    assert answer.status == 200, answer.body
    return str(answer.json["id"])


def look(server: Server, id: str) -> dict[str, Any]:
    return dict(server.call("GET", f"/v1/videos/{id}").json)


def until(server: Server, id: str, *states: str, steps: bool = False, seconds: float = 60) -> dict[str, Any]:
    """A job once it has one of these states, and has made a step."""
    end = time.monotonic() + seconds
    while (job := look(server, id))["status"] not in states or (steps and not job["step"]):
        assert time.monotonic() < end and (job["status"] not in ENDED), job
        time.sleep(0.01)
    return job


def content(server: Server, id: str) -> bytes:
    answer = server.call("GET", f"/v1/videos/{id}/content")
    assert answer.status == 200, answer.body
    return answer.body


def test_what_does_not_start(toy_artifact: Path, tmp_path: Path) -> None:
    """One line each, with the exit codes of wanrun, and nothing is left running."""
    toy, empty, file = toy_artifact, tmp_path / "empty", tmp_path / "file"
    empty.mkdir()
    file.write_text("alice short")
    file.chmod(0o600)
    data = ("--data", tmp_path / "data", "--port", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases: list[tuple[int, str, tuple[object, ...]]] = [
            (2, "error: there is no artifact ", (tmp_path / "none", *data)),
            (3, "error: ", (empty, *data)),
            (2, "error: two artifacts are called a", (f"a={toy}", f"a={toy}", *data)),
            (
                2,
                f"error: cannot listen at 127.0.0.1:{port}; found Address already",
                (toy_artifact, "--port", port),
            ),
            (
                2,
                "error: cannot listen at nowhere.invalid",
                (toy_artifact, *data, "--host", "nowhere.invalid"),
            ),
            (2, "error: the key in line 1 of ", (toy_artifact, *data, "--keys", file)),
            (
                2,
                "error: --tls-certificate and --tls-key go together",
                (toy_artifact, *data, "--tls-key", file),
            ),
            (
                2,
                "error: the TLS certificate",
                (toy_artifact, *data, "--tls-key", file, "--tls-certificate", file),
            ),
            (2, "error: the folder ", (toy_artifact, "--data", file / "x", "--port", 0)),
            (3, "error: target v5e is not built", (toy_artifact, *data, "--target", "v5e")),
        ]
        for code, line, arguments in cases:
            found, lines = refused(*arguments)
            assert (found, lines[-1].startswith(line)) == (code, True), (arguments, lines)
            assert not [line for line in lines if "Traceback" in line]


def test_without_the_extra(toy_artifact: Path, tmp_path: Path) -> None:
    """One line says what is missing."""
    (tmp_path / "starlette.py").write_text("raise ModuleNotFoundError('No module', name='starlette')")
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    code, lines = refused(toy_artifact, "--data", tmp_path / "data", PYTHONPATH=path)
    assert (code, lines[-1]) == (
        2,
        "error: wanrun serve needs starlette; pip install '.[serve]' in the checkout",
    )


def test_sigterm_lets_the_running_job_end(toy_artifact: Path, tmp_path: Path) -> None:
    """It takes no new jobs meanwhile, and the waiting one is made after the next start."""
    with served(tmp_path / "data", toy_artifact) as server:
        running, waiting = ask(server, num_steps=1000), ask(server, seed=3)
        until(server, running, "in_progress", steps=True)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.call("POST", "/v1/videos", {"prompt": PROMPT}).status == 503
        assert server.call("GET", "/readyz").status == 503
        assert look(server, waiting)["status"] == "queued"
        assert server.process.wait(60) == 0
    with served(tmp_path / "data", toy_artifact) as server:
        assert look(server, running)["attempts"] == 1 and look(server, running)["status"] == "completed"
        until(server, waiting, "completed")


def test_what_runs_too_long_waits_for_the_next_start(toy_artifact: Path, tmp_path: Path) -> None:
    with served(tmp_path / "data", toy_artifact, "--grace", 0.2) as server:
        id = ask(server, num_steps=LONG)
        until(server, id, "in_progress", steps=True)
        began = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began < 5
    with served(tmp_path / "data", toy_artifact) as server:
        assert until(server, id, "in_progress", steps=True)["attempts"] == 1  # the one before does not count
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        began = time.monotonic()
        assert server.end(signal.SIGINT) == 0  # the second one hurries it
        assert time.monotonic() - began < 5


def test_kill_minus_nine(toy_artifact: Path, tmp_path: Path) -> None:
    """Of the server and of its worker: every job ends once, with the bytes that it would have had."""
    data, jobs = tmp_path / "data", list[str]()
    server = Server(data, toy_artifact)
    port = server.port
    for pause in (0.0, 0.3, 0.9):
        jobs += [ask(server, seed=seed, num_steps=150) for seed in (1, 2)]
        time.sleep(pause)
        server.end(signal.SIGKILL)
        server = Server(data, toy_artifact, "--port", port)
    server.ready()
    jobs.append(ask(server, seed=1, num_steps=LONG))
    until(server, jobs[-1], "in_progress", steps=True, seconds=120)
    (worker,) = server.workers
    os.kill(worker, signal.SIGKILL)
    while look(server, jobs[-1])["attempts"] < 2:
        assert look(server, jobs[-1])["status"] in ("queued", "in_progress")
        time.sleep(0.02)
    until(server, jobs[-1], "in_progress", steps=True)
    server.call("POST", f"/v1/videos/{jobs[-1]}/cancel")
    until(server, jobs.pop(), "cancelled")
    assert [look(server, id)["status"] for id in jobs] == ["completed"] * 6
    first, second = content(server, jobs[0]), content(server, jobs[1])
    assert [content(server, id) for id in jobs] == [first, second] * 3 and first != second
    listed = server.call("GET", "/v1/videos?order=asc").json["data"]
    assert [job["id"] for job in listed[:6]] == jobs
    crash = ask(server, num_steps=LONG)
    until(server, crash, "in_progress", steps=True)
    (worker,) = server.workers
    os.kill(worker, signal.SIGSEGV)
    failed = until(server, crash, "failed")
    assert failed["error"]["code"] == "worker_died"
    assert "signal 11 (Segmentation fault)" in failed["error"]["message"]
    assert until(server, ask(server), "completed")["progress"] == 100
    pids = [server.process.pid, *server.workers]
    server.end(signal.SIGKILL)
    end = time.monotonic() + 5
    while [pid for pid in pids[1:] if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, "a worker outlives its server"
        time.sleep(0.05)


def test_a_worker_that_is_killed_each_time(toy_artifact: Path, tmp_path: Path) -> None:
    """As for want of memory: its job fails after some attempts, and the next one is made."""
    with served(tmp_path / "data", toy_artifact, "--attempts", 2) as server:
        id = ask(server, num_steps=LONG)
        for attempt in (1, 2):
            job = until(server, id, "in_progress", steps=True)
            assert job["attempts"] == attempt
            for pid in server.workers:
                os.kill(pid, signal.SIGKILL)
            while look(server, id)["step"]:
                time.sleep(0.01)
        failed = until(server, id, "failed")
        assert "signal 9 (Killed, perhaps for want of memory) (attempt 2)" in failed["error"]["message"]
        until(server, ask(server), "completed")


def test_an_artifact_that_is_damaged_later(toy_artifact: Path, tmp_path: Path) -> None:
    """Its jobs fail with wanrun's line, without a path; those of another model are made."""
    broken = linked(toy_artifact, tmp_path / "broken")
    with served(tmp_path / "data", f"good={toy_artifact}", f"broken={broken}") as server:
        (broken / "weights").unlink()
        failed = until(server, ask(server, model="broken"), "failed")
        assert failed["error"]["code"] == "artifact_error"
        assert str(tmp_path) not in json.dumps(failed)
        until(server, ask(server, model="good"), "completed")


def test_keys_limits_and_tls(toy_artifact: Path, tmp_path: Path) -> None:
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
    server = Server(tmp_path / "data", toy_artifact, *limits)
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

    try:
        assert call("GET", "/healthz", who="")[0] == 200
        assert call("GET", "/v1/videos", who="c")[0] == 401
        status, body, _ = call("GET", "/v1/models", who="")
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        job = {"prompt": PROMPT, "num_steps": LONG}
        ids = [call("POST", "/v1/videos", job)[1]["id"]]
        while call("GET", f"/v1/videos/{ids[0]}")[1]["status"] != "in_progress":
            time.sleep(0.05)
        ids += [call("POST", "/v1/videos", job)[1]["id"] for _ in range(2)]
        status, body, headers = call("POST", "/v1/videos", job)
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert "too many jobs of this key wait; expected at most 2" in body["error"]["message"]
        assert int(headers["retry-after"]) >= 1
        assert call("POST", "/v1/videos", job, "b")[0] == 200
        assert (
            "the queue is full; expected at most 3"
            in call("POST", "/v1/videos", job, "b")[1]["error"]["message"]
        )
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/content"),
            ("GET", "/events"),
        ):
            assert call(method, f"/v1/videos/{ids[1]}{path}", who="b")[0] == 404  # another one's
        assert [one["id"] for one in call("GET", "/v1/videos")[1]["data"]] == ids[::-1]
        assert call("POST", "/session", {"key": "wrong"})[0] == 401
        status, _, headers = call("POST", "/session", {"key": f"{KEY}a"})
        cookie = headers["set-cookie"]
        assert status == 204 and "HttpOnly" in cookie and "SameSite=strict" in cookie and "Secure" in cookie
    finally:
        server.end(signal.SIGKILL)


def test_every_option_has_its_line_in_the_page() -> None:
    """docs/serving.md names what ``wanrun serve --help`` does."""
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    options = {option for one in serve.params for option in one.opts if option.startswith("--")}
    assert len(options) > 20
    assert sorted(option for option in options - {"--debug"} if f"`{option}" not in text) == []
