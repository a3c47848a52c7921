"""Processes of one run, started together, and how each of them ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from helpers.terminal import complaints

LIMIT_SECONDS = 60.0
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


def lost_in_the_steps(
    count: int, victim: int, number: signal.Signals, artifact: Path, folder: Path
) -> list[Ended]:
    """Signals one process of several while they make steps; returns how each ended, with errors as JSON.

    Process 0 has to leave the video that it had made before, and the others nothing.
    """
    folders = [folder / f"of-{index}" for index in range(count)]
    for one in folders:
        one.mkdir()
    prompts = folder / "prompts.jsonl"
    lines = [{"prompt": "a fox", "steps": steps, "seed": seed} for seed, steps in enumerate((1, 1000))]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    patterns = [one / "{seed}.npy" for one in folders]
    options = ("--artifact", artifact, "--prompts", prompts, "--json-errors")
    commands = wanrun_commands(count, *options, output=patterns)
    with Processes(commands, folder) as processes:
        processes.wait_for(0, "wrote", "out")  # the first; the second takes minutes
        time.sleep(1)
        processes.signal(victim, number)
        ended = [processes.ended(index) for index in range(count)]
    left = [sorted(file.name for file in one.iterdir()) for one in folders]
    assert left == [["0.npy", "0.npy.json"]] + [[]] * (count - 1)
    return ended


def main(artifact: Path) -> None:
    """Ends each of two and of four processes in turn, by each signal, and prints how all ended."""
    for count in (2, 4):
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            for victim in range(count):
                with tempfile.TemporaryDirectory() as folder:
                    ended = lost_in_the_steps(count, victim, number, artifact, Path(folder))
                codes, seconds = [one.code for one in ended], max(one.seconds for one in ended)
                print(f"{number.name} to {victim} of {count}: codes {codes}, all gone after {seconds:.1f} s")
                print(*sorted({line for one in ended for line in one.errors}), sep="\n", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
