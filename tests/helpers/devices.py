"""Runs functions of tests in processes of their own that have several CPU devices: pytest's has one."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 300


def on_devices(count: int, function: Callable[..., Any], *arguments: Any) -> str:
    """Calls a function of a module where JAX has so many devices; returns what it printed.

    Args:
        count: the CPU devices.
        function: a function at the top of a module.
        arguments: its arguments, which ``repr`` spells.
    """
    (printed,) = _printed([_code(count, "", function, arguments)])
    return printed


def in_processes(processes: int, count: int, function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Calls it in several processes that JAX joins, each with so many devices; returns what each printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    joined = "jax.distributed.initialize('127.0.0.1:{}', {}, {}); "
    return _printed(
        [_code(count, joined.format(port, processes, n), function, arguments) for n in range(processes)]
    )


def _code(count: int, first: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    file = inspect.getfile(function)
    return (
        f"import jax, runpy; jax.config.update('jax_num_cpu_devices', {count}); {first}"
        f"runpy.run_path({file!r})[{function.__name__!r}](*{arguments!r})"
    )


def _printed(codes: list[str]) -> list[str]:
    """Runs programs side by side; each has to succeed."""
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    with contextlib.ExitStack() as stack:
        running = []
        for code in codes:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            running.append(process)
        ended = [process.communicate(timeout=LIMIT_SECONDS) for process in running]
    for process, (out, err) in zip(running, ended, strict=True):
        assert process.returncode == 0, out + err
    return [out for out, _ in ended]
