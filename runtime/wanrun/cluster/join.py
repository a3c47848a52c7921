"""Joins the processes that run an artifact together, for a Python program and the command."""

from __future__ import annotations

import math
import re

from wanrun.cluster.process_group import JOIN_SECONDS, ProcessGroup
from wanrun.errors import UsageError, field, shortened, wrong_type

MAX_PROCESSES = 1024

_HOST = re.compile(r"(?=.{1,253}$)[\w-]{1,63}(?:\.[\w-]{1,63})*\.?|\[[\w:.%]{2,64}\]", re.ASCII)
"""A name or an address of IPv4, of labels with dots between them; or one of IPv6, in brackets."""


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_seconds: float = JOIN_SECONDS,
) -> ProcessGroup:
    """Returns the processes of a run, for ``with`` and for ``load``; each process calls this.

    ``with wanrun.join("10.0.0.1:8476", 2, 0) as group, wanrun.load(folder, group=group) as pipeline:``

    Args:
        coordinator: HOST:PORT of process 0, a free port of its host.
        num_processes: how many processes there are.
        process_id: the number of this one. What is left out is found by ``jax.distributed.initialize``: on
            TPU pods, with Slurm, and in Kubernetes.
        timeout_seconds: how long the processes wait for one another.

    Raises:
        UsageError: for a value of another type or out of range.
    """
    for name, value, kind, words in (
        ("coordinator", coordinator, str, "a string"),
        ("num_processes", num_processes, int, "an integer"),
        ("process_id", process_id, int, "an integer"),
        ("timeout_seconds", timeout_seconds, int | float, "a number"),
    ):
        optional = value is None and name != "timeout_seconds"
        if isinstance(value, bool) or not (optional or isinstance(value, kind)):
            raise wrong_type(name, words, value)
    if not 1 <= timeout_seconds < math.inf:
        raise UsageError(
            "out_of_range",
            f"{field('timeout_seconds')} is out of range",
            expected="1 or more seconds",
            found=timeout_seconds,
        )
    if coordinator is not None:
        _check_address(coordinator)
    if num_processes is not None:
        _check_range("num_processes", num_processes, 2, MAX_PROCESSES)
    if process_id is not None:
        _check_range("process_id", process_id, 0, (num_processes or MAX_PROCESSES) - 1)
    return ProcessGroup(coordinator, num_processes, process_id, timeout_seconds)


def _check_address(coordinator: str) -> None:
    host, _, port = coordinator.rpartition(":")
    if not (_HOST.fullmatch(host) and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
        raise UsageError(
            "wrong_kind",
            f"{field('coordinator')} is not an address",
            expected="HOST:PORT such as 10.0.0.1:8476",
            found=shortened(coordinator),
        )


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UsageError(
            "out_of_range", f"{field(name)} is out of range", expected=f"{least} to {most}", found=value
        )
