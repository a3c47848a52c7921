"""The processes of a run: the address of process 0, how many there are, and this one's number."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from wanrun.errors import UsageError, field, shortened

MAX_PROCESSES = 1024

_HOST = re.compile(r"(?=.{1,253}$)[\w-]{1,63}(?:\.[\w-]{1,63})*\.?|\[[\w:.%]{2,64}\]", re.ASCII)
"""A name or an address of IPv4, of labels with dots between them; or one of IPv6, in brackets."""

_FIELDS = ("coordinator", "num_processes", "process_id")


@dataclass(frozen=True)
class Cluster:
    """The processes of a run; each of them is given the same artifact and the same request.

    Args:
        coordinator: HOST:PORT of process 0, where it waits for the others.
        process_id: the number of this one, from 0.
        local_device_ids: the devices of this host that are this process's; None for all.

    Raises:
        UsageError: for an address without a port, or a number out of range.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        host, _, port = self.coordinator.rpartition(":")
        if not (_HOST.fullmatch(host) and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
            raise UsageError(
                f"{field('coordinator')} is not an address",
                expected="HOST:PORT such as 10.0.0.1:8476",
                found=shortened(self.coordinator),
            )
        if not 2 <= self.num_processes <= MAX_PROCESSES:
            raise UsageError(
                f"{field('num_processes')} is out of range",
                expected=f"2 to {MAX_PROCESSES}",
                found=self.num_processes,
            )
        if not 0 <= self.process_id < self.num_processes:
            raise UsageError(
                f"{field('process_id')} is out of range",
                expected=f"0 to {self.num_processes - 1}",
                found=self.process_id,
            )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of process 0."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def loopback(self) -> bool:
        """Whether process 0 is reached by this host's loopback device alone; OSError for an unknown name."""
        return is_loopback(self.resolved()[1])

    def resolved(self) -> tuple[socket.AddressFamily, str]:
        """Returns the family and the address of process 0's host; OSError for an unknown name."""
        family, _, _, _, found = socket.getaddrinfo(self.address[0], None, type=socket.SOCK_STREAM)[0]
        return family, str(found[0])


def is_loopback(address: str) -> bool:
    """Whether an address of IPv4 or IPv6 is of the loopback device."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def found_cluster(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_seconds: int = 300,
) -> Cluster:
    """Finds the processes of this run as ``jax.distributed.initialize`` does: TPU pods, Slurm, Kubernetes.

    JAX finds them and connects in one call, but the address is needed before (``wanrun.cluster.relay``). So
    this calls the function inside, which is not public (BUILD_NOTES.md, "What we touch of JAX").

    Args:
        coordinator: replaces the address that would be found. So do the next two for the numbers.
        timeout_seconds: how long the name of process 0's host may take to be known.

    Raises:
        UsageError: if nothing is found.
    """
    from jax._src.clusters import ClusterEnv

    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    named = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    ids: Sequence[int] | None = None
    why = "no TPU pod, Slurm, Kubernetes or MPI"
    try:
        ids = [int(one) for one in named.split(",")] if named else None
        coordinator, num_processes, process_id, ids = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, num_processes, process_id, ids, None, timeout_seconds
        )
    except (RuntimeError, OSError, KeyError, ValueError) as error:
        why = " ".join(str(error).split())
    if coordinator is None or num_processes is None or process_id is None:
        raise UsageError(
            "the processes of this run cannot be found",
            expected="a cluster that JAX knows",
            found=why,
            remedy=f"pass {', '.join(map(field, _FIELDS))}",
        )
    return Cluster(coordinator, num_processes, process_id, None if ids is None else tuple(ids))
