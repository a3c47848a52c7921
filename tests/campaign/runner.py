"""Runs the command of a fault, in the worker or in a process of its own, and sees how it ends."""

from __future__ import annotations

import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from campaign.fault import LIMIT_SECONDS, Case, Ended

RESTART_AFTER = 400
"""Faults that a worker takes before a new one does: what leaks in one command is looked for elsewhere."""


class Runner:
    """Runs commands.

    Args:
        folder: of the user's cache, and the working folder of the processes.
    """

    def __init__(self, folder: Path) -> None:
        self._environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}
        self._environment["HF_HUB_OFFLINE"] = "1"
        self._folder = folder
        self._worker: subprocess.Popen[str] | None = None
        self._done = 0

    def __call__(self, case: Case) -> Ended:
        """Runs a fault's command to its end, or for ``LIMIT_SECONDS``."""
        return self._in_process(case) if case.process else self._in_worker(case)

    def close(self) -> None:
        """Ends the worker."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None

    def _in_process(self, case: Case) -> Ended:
        arguments = [sys.executable, "-m", case.command, *case.arguments]
        if case.shell:
            arguments = ["/bin/sh", "-c", f"exec {shlex.join(arguments)} {case.shell}"]
        environment = {**self._environment, **{k: v for k, v in case.environment.items() if v is not None}}
        for name, value in case.environment.items():
            if value is None:
                environment.pop(name, None)
        process = subprocess.Popen(
            arguments,
            env=environment,
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            restore_signals=True,
        )
        started = time.monotonic()
        if case.signal is not None:
            try:
                process.wait(case.after_seconds)
            except subprocess.TimeoutExpired:
                started = time.monotonic()
                process.send_signal(case.signal)
        return _ended(process, started)

    def _in_worker(self, case: Case) -> Ended:
        if self._worker is None or self._done >= RESTART_AFTER:
            self.close()
            self._worker = self._start()
            self._done = 0
        self._done += 1
        request = {
            "command": case.command,
            "arguments": list(case.arguments),
            "environment": dict(case.environment),
        }
        started = time.monotonic()
        assert self._worker.stdin is not None and self._worker.stdout is not None
        print(json.dumps(request), file=self._worker.stdin, flush=True)
        answer = _line(self._worker.stdout, LIMIT_SECONDS)
        seconds = time.monotonic() - started
        if answer is None:
            self.close()
            return Ended(None, seconds, "", "")
        if not answer:
            code = self._worker.wait()
            self.close()
            return Ended(code, seconds, "", "the process died")
        reply: dict[str, Any] = json.loads(answer)
        return Ended(reply["code"], seconds, reply["out"], reply["err"])

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


def _ended(process: subprocess.Popen[str], started: float) -> Ended:
    try:
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        out, err = process.communicate()
        return Ended(None, time.monotonic() - started, out, err)
    return Ended(process.returncode, time.monotonic() - started, out, err)


def _line(stream: IO[str], seconds: float) -> str | None:
    """Reads a line; None if none comes in time, and '' at the end of the stream."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline() if selector.select(seconds) else None
