"""Starts JAX in several processes: the service by which they find one another's devices, and collectives."""

from __future__ import annotations

import socket

from wanrun.artifact.mesh import Sizes, mesh_text, normal, num_devices
from wanrun.cluster.process_group import ProcessGroup
from wanrun.cluster.relay import relayed
from wanrun.errors import ClusterError, UsageError

_NEVER_SECONDS = 365 * 24 * 3600
"""JAX's own watching is not used: see ``wanrun.cluster.process_group``."""

_END_SECONDS = 10
"""Seconds that JAX waits for the other processes when a Python program ends; they may have failed."""

_START_SECONDS = 60
"""Seconds to connect; all processes have started already."""


def start_jax(group: ProcessGroup) -> None:
    """Connects this process's JAX with that of the others. All processes call this before JAX has devices.

    Raises:
        UsageError: if JAX has started before.
        ClusterError: if it cannot connect.
    """
    import jax

    cluster = group.cluster
    host = cluster.address[0]
    port = group.exchange(_free_port(host) if group.leads else None)[0]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if not group.leads:
        address = f"127.0.0.1:{relayed(host, port)}"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            address,
            group.num_processes,
            group.process,
            local_device_ids=cluster.local_device_ids,
            coordinator_bind_address=address if group.leads and cluster.loopback else None,
            cluster_detection_method="deactivate",
            initialization_timeout=_START_SECONDS,
            heartbeat_timeout_seconds=_NEVER_SECONDS,
            shutdown_timeout_seconds=_END_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())
        if "initialise" in text or "only be called once" in text:
            raise UsageError(
                "JAX has started in this process, and cannot be connected with others any more",
                expected="no JAX array or device before",
                found=text,
                remedy="join the other processes first",
            ) from None
        raise ClusterError("JAX cannot connect the processes", found=text) from error
    group.at_end(jax.distributed.shutdown)


def local_devices(mesh: Sizes, group: ProcessGroup) -> int:
    """Returns how many devices of a mesh each process has.

    Raises:
        UsageError: if the processes cannot share them evenly.
    """
    total = num_devices(mesh)
    if total % group.num_processes:
        raise UsageError(
            f"the {total} devices of this target's mesh, {mesh_text(normal(mesh))}, cannot be shared evenly",
            expected="a number of processes that divides them",
            found=group.num_processes,
            remedy="choose another --target, or run wanbuild compile --mesh",
        )
    return total // group.num_processes


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])
