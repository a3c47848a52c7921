"""The parts of gpu.py that run ``wanrun serve``: ``python gpu_serve.py NAME JSON``."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpu_rows import Rows, main
from serve_client import Server, served

LONG, SHORT = 8000, 2
"""Steps of a job that does not end by itself here, and of one that does."""


def serve(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Serves an artifact; cancels a job, ends a worker under another, and says when the next could run.

    Args:
        rows: gets the times.
        arguments: ``artifact``, and ``data``, the server's folder.
    """
    with served(Path(arguments["data"]), f"toy={arguments['artifact']}") as server:
        rows.add("until ready", time.monotonic() - server.began, "s")
        with rows.attempt("a job"):
            rows.add(f"a job of {SHORT} steps", _job(server), "s", "completed")
        with rows.attempt("cancel"):
            rows.add("a running job until it is cancelled", _cancelled(server, _running(server)), "s")
            rows.add("the job after it", _job(server), "s", "completed")
        with rows.attempt("kill"):
            id = _running(server)
            rows.add("a job until it makes steps again after its worker was killed", _killed(server, id), "s")
            _cancelled(server, id)
            rows.add("the job after a kill", _job(server), "s", "completed")


def memory(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Serves an artifact; asks for a video that does not fit, and then for one that does.

    Args:
        rows: gets the times, and the reason that the server gives.
        arguments: ``artifact``; ``data``, the server's folder; ``size``, of the video that does not fit. In a
            smoke run it fits, but the worker is given little more of the host's memory than it has.

    Raises:
        RuntimeError: if the job fails for another reason.
    """
    with served(Path(arguments["data"]), f"toy={arguments['artifact']}", "--attempts", 1) as server:
        rows.add(f"a job of {SHORT} steps", _job(server), "s", "completed")
        if arguments["smoke"]:
            for worker in server.workers:
                limit = _data_bytes(worker) + MORE
                resource.prlimit(worker, resource.RLIMIT_DATA, (limit, limit))
        began = time.monotonic()
        failed = server.until(_ask(server, SHORT, size=arguments["size"]), "failed")
        error = failed["error"]
        if error["code"] not in REASONS[: None if arguments["smoke"] else 1]:
            raise RuntimeError(f"the job has failed with {error}")
        rows.add("a job that does not fit, until it fails", time.monotonic() - began, "s", error["message"])
        rows.add("the job after it", _job(server), "s", "completed")


def _data_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:"))


MORE = 16_000_000
"""Bytes of which the toy's decode takes three times as many, and its other programs fewer."""
REASONS = ("out_of_memory", "worker_died")
"""Codes of a job that does not fit: a process may end before it can say that the host has no memory."""


def _ask(server: Server, steps: int, **more: str) -> str:
    # WebP needs no ffmpeg, which the machine may lack.
    request = {"prompt": "a red fox", "num_steps": steps, "format": "webp", **more}
    answer = server.call("POST", "/v1/videos", request)
    if answer.status != 200:
        raise RuntimeError(f"the server has answered {answer.status}: {answer.body!r}")
    return str(answer.json["id"])


def _job(server: Server) -> float:
    """Seconds of a short job, from its request to its end."""
    began = time.monotonic()
    server.until(_ask(server, SHORT), "completed")
    return time.monotonic() - began


def _running(server: Server) -> str:
    """A long job that makes steps."""
    id = _ask(server, LONG)
    server.running(id)
    return id


def _cancelled(server: Server, id: str) -> float:
    """Seconds from the request to cancel a job until it is cancelled."""
    began = time.monotonic()
    server.call("POST", f"/v1/videos/{id}/cancel")
    server.until(id, "cancelled")
    return time.monotonic() - began


def _killed(server: Server, id: str) -> float:
    """Seconds from the end of a job's worker until another one makes its steps."""
    began = time.monotonic()
    (worker,) = server.workers
    os.kill(worker, signal.SIGKILL)
    while server.look(id)["attempts"] < 2:
        if time.monotonic() > began + 60:
            raise TimeoutError("no other worker has taken the job")
        time.sleep(0.005)
    server.running(id)
    return time.monotonic() - began


if __name__ == "__main__":
    main(MappingProxyType({"serve": serve, "memory": memory}))
