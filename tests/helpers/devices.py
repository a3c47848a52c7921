"""Runs a function of a test in a process of its own that has several CPU devices: pytest's has one."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def on_devices(count: int, function: Callable[..., Any], *arguments: Any) -> str:
    """Calls a function of a module where JAX has so many devices; returns what it printed.

    Args:
        count: the CPU devices.
        function: a function at the top of a module.
        arguments: its arguments, which ``repr`` spells.
    """
    file = inspect.getfile(function)
    code = (
        f"import jax, runpy; jax.config.update('jax_num_cpu_devices', {count})\n"
        f"runpy.run_path({file!r})[{function.__name__!r}](*{arguments!r})"
    )
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
