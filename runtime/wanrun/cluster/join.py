"""How a Python program, or the command, says which processes run an artifact together."""

from __future__ import annotations

from wanrun.cluster.launch import Cluster, found_cluster
from wanrun.cluster.process_group import JOIN_SECONDS, ProcessGroup
from wanrun.errors import wrong_type


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
        process_id: the number of this one. What is left out is found as by
            ``jax.distributed.initialize``: on TPU pods, with Slurm, and in Kubernetes.
        timeout_seconds: how long the processes wait for one another.

    Raises:
        UsageError: for a value of another type or out of range, or if the rest is not found, or is one
            process.
    """
    for name, value, kind, words in (
        ("coordinator", coordinator, str, "a string"),
        ("num_processes", num_processes, int, "an integer"),
        ("process_id", process_id, int, "an integer"),
        ("timeout_seconds", timeout_seconds, int | float, "a number"),
    ):
        if isinstance(value, bool) or not isinstance(value, kind | None):
            raise wrong_type(name, words, value)
    if coordinator is not None and num_processes is not None and process_id is not None:
        return ProcessGroup(Cluster(coordinator, num_processes, process_id), timeout_seconds)
    cluster = found_cluster(coordinator, num_processes, process_id, int(timeout_seconds))
    return ProcessGroup(cluster, timeout_seconds)
