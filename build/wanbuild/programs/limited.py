"""Compiles in separate processes programs that one process cannot compile together.

XLA reads its limit on the instruction set once, when its CPU client starts. As an option of one program it is
taken and has no effect on the machine code (jaxlib 0.10.2: same features, same code). So every limit has a
process, and its executables do not depend on the flags of the process that loads them.

Mosaic GPU has ptxas compile all kernels of a process for the compute capability of the first one, and ptxas
refuses those of another (jaxlib 0.10.2 registers the pass once, with it). So every chip that is not here has
a process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wanrun.artifact.mesh import Sizes
from wanrun.errors import WanError
from wanrun.undo import begun

FLAG = "--xla_cpu_max_isa"
"""XLA's flag."""


class LimitedProcesses(contextlib.ExitStack):
    """Processes that compile for one target each, with a limit on the instruction set or without.

    On exit they end, in the middle of a program if there was an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._processes: dict[tuple[str, str], subprocess.Popen[bytes]] = {}

    def compile(
        self, target: str, limit: str, cache: Path, mesh: Sizes, name: str, data: bytes, donate: Sequence[str]
    ) -> Mapping[str, Any]:
        """Compiles a serialized program into an empty cache folder; returns the compiler's figures.

        ``target`` is the name of a target that needs no device, without its mesh; ``limit`` is a value of
        XLA's flag for a CPU, empty for none; ``mesh`` has devices by axis, and is empty for one. Raises what
        the compilation raises, and WanError if the process is killed.
        """
        key = target, limit
        if key not in self._processes:
            started = self.enter_context(begun(lambda: _started(limit), subprocess.Popen.kill))
            self.callback(started.communicate)  # closes its input, which ends it
            self.push(lambda kind, *_: started.kill() if kind else None)
            self._processes[key] = started
        process = self._processes[key]
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump((target, str(cache), dict(mesh), name, data, tuple(donate)), process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (EOFError, OSError):
            raise WanError(
                "failed",
                f"the process that compiles {name} for {limit or target} has ended",
                expected="the executable",
                found="the process killed, perhaps because memory ran out",
                remedy="run it again with more free memory",
            ) from None
        if isinstance(answer, Exception):
            raise answer
        figures: Mapping[str, Any] = answer
        return figures


def _started(limit: str) -> subprocess.Popen[bytes]:
    """Starts a process in a separate session, where Ctrl-C does not reach it: this process ends it."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {f'{FLAG}={limit}' if limit else ''}".strip()
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "XLA_FLAGS": flags},
        start_new_session=True,
    )


def main() -> None:
    """Compiles programs that standard input names until it closes, also because the parent was killed."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's output must not mix with the answers
    requests = queue.SimpleQueue[Any]()

    def read() -> None:
        try:
            while True:
                requests.put(pickle.load(sys.stdin.buffer))
        finally:  # its end, perhaps within a request
            os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    answer: Mapping[str, Any] | Exception
    while True:
        try:
            answer = _compile(*requests.get())
        except Exception as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


def _compile(
    target: str, cache: str, mesh: Sizes, name: str, data: bytes, donate: Sequence[str]
) -> Mapping[str, Any]:
    """Compiles a program in this process."""
    from wanbuild.programs.jax_flags import pinned
    from wanbuild.programs.xla import compile_into
    from wanbuild.targets.target import resolve_target

    with pinned("cpu"):
        return compile_into(Path(cache), resolve_target(target, mesh), name, data, donate)


if __name__ == "__main__":
    main()
