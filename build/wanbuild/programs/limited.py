"""Compiles for a level of CPUs, in processes of their own.

XLA reads its limit on the instruction set once, when its CPU client starts. As an option of one program it is
taken and has no effect on the machine code (jaxlib 0.10.2: same features, same code). So every limit has a
process, and its executables do not depend on the flags of the process that loads them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wanrun.artifact.mesh import Sizes
from wanrun.errors import WanError

FLAG = "--xla_cpu_max_isa"
"""XLA's flag."""


class LimitedProcesses:
    """Processes that compile with a limit on the instruction set, one for each limit.

    On exit they end; after an error at once, in the middle of a program.
    """

    def __init__(self) -> None:
        self._pools: dict[str, ProcessPoolExecutor] = {}
        self._processes: set[BaseProcess] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes if kind is not None else ():
            process.kill()
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def compile(
        self, limit: str, cache: Path, mesh: Sizes, name: str, data: bytes, donate: Sequence[str]
    ) -> Mapping[str, Any]:
        """Compiles an exported program for CPUs into an empty cache folder; returns the compiler's figures.

        Args:
            limit: a value of XLA's flag.
            cache: the folder.
            mesh: devices by axis; empty for one.
            name: the program's name.
            data: the serialized program.
            donate: names of donated arguments.

        Raises:
            WanError: if the process is killed.
        """
        pool, others = self._pool(limit), set(multiprocessing.active_children())
        try:
            with _limited(limit):  # the process starts with its first task
                future = pool.submit(_compile, str(cache), dict(mesh), name, data, tuple(donate))
            self._processes |= set(multiprocessing.active_children()) - others
            return future.result()
        except BrokenProcessPool:
            raise WanError(
                f"the process that compiles {name} for {limit} has ended",
                expected="the executable",
                found="the process killed, perhaps because memory ran out",
                remedy="run it again with more free memory",
            ) from None

    def _pool(self, limit: str) -> ProcessPoolExecutor:
        if limit not in self._pools:
            spawn = multiprocessing.get_context("spawn")
            self._pools[limit] = ProcessPoolExecutor(1, mp_context=spawn, initializer=_end_with_parent)
        return self._pools[limit]


@contextlib.contextmanager
def _limited(limit: str) -> Iterator[None]:
    """Adds the limit to XLA's flags in the environment of processes that start meanwhile."""
    before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{before or ''} {FLAG}={limit}".strip()
    try:
        yield
    finally:
        if before is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = before


def _end_with_parent() -> None:
    """Ends this process when its parent is gone, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _compile(cache: str, mesh: Sizes, name: str, data: bytes, donate: Sequence[str]) -> Mapping[str, Any]:
    """Compiles a program in this process."""
    from wanbuild.programs.compiler import compile_into
    from wanbuild.programs.jax_flags import pinned
    from wanbuild.targets.target import resolve_target

    with pinned("cpu"):
        return compile_into(Path(cache), resolve_target("cpu", mesh), name, data, donate)
