"""Compiles for a level of CPUs, in processes of their own.

XLA reads its limit on the instruction set once, when its CPU client starts. As an option of one program it is
taken and has no effect on the machine code (jaxlib 0.10.2: same features, same code). So every limit has a
process, and what that compiles does not depend on the flags of the process that loads it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wanrun.artifact.mesh import Sizes

FLAG = "--xla_cpu_max_isa"
"""XLA's flag."""


class LimitedProcesses:
    """Processes that compile with a limit on the instruction set, one for each limit; ends them on exit."""

    def __init__(self) -> None:
        self._pools: dict[str, ProcessPoolExecutor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """
        with _limited(limit):  # the process starts with its first task
            pool = self._pools.get(limit)
            if pool is None:
                spawn = multiprocessing.get_context("spawn")
                pool = self._pools[limit] = ProcessPoolExecutor(1, mp_context=spawn)
            future = pool.submit(_compile, str(cache), dict(mesh), name, data, tuple(donate))
        return future.result()


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


def _compile(cache: str, mesh: Sizes, name: str, data: bytes, donate: Sequence[str]) -> Mapping[str, Any]:
    """Compiles a program in this process."""
    from wanbuild.programs.compiler import compile_into
    from wanbuild.targets.target import resolve_target
    from wanrun.artifact.jax_process import JaxFlags

    with JaxFlags("cpu"):
        return compile_into(Path(cache), resolve_target("cpu", mesh), name, data, donate)
