"""Runs a measuring script in a fresh process and reads its figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def clean_environment(**changes: str) -> dict[str, str]:
    """Returns the environment for a measured process: bytecode is kept, as after an installation."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, **changes}


def run_timed(
    command: Sequence[object], timeout: float, environment: Mapping[str, str] | None = None
) -> float:
    """Runs a command in its own session and returns its wall seconds.

    Raises:
        SystemExit: if it fails or exceeds the timeout; the command and its children are then ended.
    """
    words = [str(word) for word in command]
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        with subprocess.Popen(
            words, stdout=output, stderr=output, env=environment, start_new_session=True
        ) as process:
            try:
                code = process.wait(timeout)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                code = -signal.SIGKILL
        seconds = time.perf_counter() - started
        if code:
            output.seek(0)
            tail = output.read().decode(errors="replace")[-3000:]
            raise SystemExit(f"{' '.join(words)[:300]} ended with {code} after {seconds:.0f} s:\n{tail}")
    return seconds


def measure(
    script: Path,
    name: str,
    arguments: Mapping[str, Any],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs ``python SCRIPT NAME JSON`` and returns the object it writes.

    The JSON holds the arguments, ``result`` (the file to write) and ``spawned`` (the start on
    time.monotonic(), one clock for all processes). ``-P`` keeps the script's folder off the module path,
    where benchmarks would hide packages of the same name from the measured libraries.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        payload = json.dumps({**arguments, "result": str(result), "spawned": time.monotonic()})
        seconds = run_timed([sys.executable, "-P", script, name, payload], timeout, environment)
        if not result.exists():
            raise SystemExit(f"{script.name} {name} ended without a result: the point to stop at never came")
        return {**json.loads(result.read_text()), "wall_seconds": seconds}
