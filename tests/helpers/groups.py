"""Processes of one run, started together, and how each of them ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from helpers.said import complaints
from wanrun.cluster.join import join
from wanrun.cluster.process_group import ProcessGroup
from wanrun.errors import WanError

LIMIT_SECONDS = 30.0
"""In which the failure of one process has to end all."""

START_SECONDS = 240.0
"""In which a run has to reach its steps, or its end, on a machine with other work."""


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: its exit code.
        output: what it printed.
        errors: its lines on stderr, without those about progress.
        seconds: from the signal, or the start, to its end.
    """

    code: int
    output: str
    errors: list[str]
    seconds: float


class Processes:
    """Processes that run at the same time; leaving the context ends what is left of them.

    Args:
        commands: of each process.
        folder: where their output is kept.
        environment: further variables, of each process.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        folder: Path,
        environment: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        self._started, self._folder = time.monotonic(), folder
        self._processes = []
        for index, command in enumerate(commands):
            own = {} if environment is None else environment[index]
            with self._file(index, "out").open("wb") as out, self._file(index, "err").open("wb") as err:
                process = subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, **own})
            self._processes.append(process)

    def _file(self, index: int, name: str) -> Path:
        return self._folder / f"{index}.{name}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def wait_for(self, index: int, words: str, name: str = "err") -> None:
        """Waits until a process has printed these words."""
        deadline = time.monotonic() + START_SECONDS
        while words not in self._file(index, name).read_text():
            assert self._processes[index].poll() is None, self._file(index, "err").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def signal(self, index: int, number: signal.Signals) -> None:
        """Sends a signal to a running process; the time of all ends is counted from here."""
        assert self._processes[index].poll() is None
        self._started = time.monotonic()
        self._processes[index].send_signal(number)

    def ended(self, index: int, limit_seconds: float = LIMIT_SECONDS) -> Ended:
        """Waits for the end of a process, which has to come within the limit."""
        left = max(0.0, self._started + limit_seconds - time.monotonic())
        code = self._processes[index].wait(left)
        seconds = time.monotonic() - self._started
        errors = complaints(self._file(index, "err").read_text())
        return Ended(code, self._file(index, "out").read_text(), errors, seconds)


def wanrun_commands(count: int, *options: object, **of_each: Sequence[object]) -> list[list[str]]:
    """The commands of a run of several ``wanrun``.

    Args:
        count: how many processes.
        options: of all.
        of_each: an option with the value of each process.
    """
    program, port = str(Path(sys.executable).with_name("wanrun")), free_port()
    commands = []
    for index in range(count):
        who = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", count, "--process-id", index]
        own = [part for name, values in of_each.items() for part in (f"--{name}", values[index])]
        commands.append([program, *map(str, [*options, *own, *who])])
    return commands


def run_threads(
    count: int, work: Callable[[ProcessGroup], Any], port: int | None = None, host: str = "127.0.0.1"
) -> list[Any]:
    """What ``work`` returns, or the error that it raises, for each of several groups of one process."""
    port, results = port or free_port(), list[Any]([None] * count)

    def one(index: int) -> None:
        try:
            with join(f"{host}:{port}", count, index, timeout_seconds=60) as group:
                results[index] = work(group)
        except WanError as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results
