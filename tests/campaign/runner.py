"""Runs the commands of a fault, in the worker or in processes of their own, and sees how they end."""

from __future__ import annotations

import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from campaign.fault import LIMIT_SECONDS, Call, Case, Ended

RESTART_AFTER = 400
"""Faults that a worker takes before a new one does: what leaks in one command is looked for elsewhere."""


LIMITED = """
import json, os, resource, sys
for name, most in json.loads(sys.argv[1]).items():
    kind = getattr(resource, name)
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])
"""
"""Limits itself and becomes the command: a fork of the tests' process would be one of JAX's threads too."""


class Runner:
    """Runs commands.

    Args:
        folder: of the user's cache, and the working folder of the processes.
    """

    def __init__(self, folder: Path) -> None:
        self._environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}
        self._environment["HF_HUB_OFFLINE"] = "1"
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment["PYTHONPATH"] = os.pathsep.join(paths)
        self._folder = folder
        self._worker: subprocess.Popen[str] | None = None
        self._done = 0

    def __call__(self, case: Case) -> list[Ended]:
        """Runs a fault's commands, each for ``LIMIT_SECONDS`` at most, then the one that is repeated."""
        if not case.process and len(case.calls) == 1:
            ended = [self._in_worker(case.calls[0])]
        else:
            processes = [_Process(call, self._environment, self._folder) for call in case.calls]
            if case.signal is not None:
                processes[0].send(case.signal, case.after_seconds)
            ended = [process.ended() for process in processes]
        if case.again is not None:
            ended.append(self._in_worker(case.again))
        return ended

    def close(self) -> None:
        """Ends the worker."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None

    def _in_worker(self, call: Call) -> Ended:
        if self._worker is None or self._done >= RESTART_AFTER:
            self.close()
            self._worker = self._start()
            self._done = 0
        self._done += 1
        request = {"command": call.command, "arguments": list(call.arguments)}
        request["environment"] = dict(call.environment)
        started = time.monotonic()
        assert self._worker.stdin is not None and self._worker.stdout is not None
        print(json.dumps(request), file=self._worker.stdin, flush=True)
        answer = _line(self._worker.stdout, LIMIT_SECONDS)
        seconds = time.monotonic() - started
        if answer is None:
            self.close()
            return Ended(None, seconds, "")
        if not answer:
            code = self._worker.wait()
            self.close()
            return Ended(code, seconds, "the process died")
        reply: dict[str, Any] = json.loads(answer)
        return Ended(reply["code"], seconds, reply["err"])

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "campaign.worker"],
            env=self._environment,
            cwd=self._folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )


class _Process:
    """A command in a process of its own, started."""

    def __init__(self, call: Call, environment: Mapping[str, str], folder: Path) -> None:
        limited = ["-c", LIMITED, json.dumps(dict(call.limits))] if call.limits else ["-m"]
        arguments = [sys.executable, *limited, call.command, *call.arguments]
        if call.shell:
            arguments = ["/bin/sh", "-c", f"exec {shlex.join(arguments)} {call.shell}"]
        changed: dict[str, str | None] = {**environment, **call.environment}
        self._process = subprocess.Popen(
            arguments,
            env={name: value for name, value in changed.items() if value is not None},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,  # a file would be under the limits
            text=True,
            errors="replace",
        )
        self._started = time.monotonic()
        self._sent_after: float | None = None

    def send(self, number: signal.Signals, after_seconds: float) -> None:
        """Sends a signal after some time, unless the command has ended by then."""
        try:
            self._process.wait(after_seconds)
        except subprocess.TimeoutExpired:
            self._sent_after = time.monotonic() - self._started
            self._started = time.monotonic()
            self._process.send_signal(number)

    def ended(self) -> Ended:
        """Waits for the end."""
        code: int | None
        try:
            _, err = self._process.communicate(timeout=LIMIT_SECONDS)
            code = self._process.returncode
        except subprocess.TimeoutExpired:
            self._process.kill()
            _, err = self._process.communicate()
            code = None
        return Ended(code, time.monotonic() - self._started, err, self._sent_after)


def _line(stream: IO[str], seconds: float) -> str | None:
    """Reads a line; None if none comes in time, and '' at the end of the stream."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline() if selector.select(seconds) else None
