"""The processes of a run, connected by JAX's own service: who is in it, and what they agree on.

The service runs in process 0, and all others send it heartbeats. Where a process is gone, it ends the others
from C++, by SIGABRT: nothing else interrupts a collective. A command has a parent that is left then.
"""

from __future__ import annotations

__all__ = ["ProcessGroup"]

import ipaddress
import json
import os
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from wanrun.artifact.mesh import Sizes, mesh_text, normal, num_devices
from wanrun.errors import ArtifactError, ClusterError, UsageError, WanError, field, lost_process, shortened

JOIN_SECONDS = 300.0
"""How long the processes wait for one another at the start, as JAX does."""

HEARTBEAT_SECONDS = 30
"""Without a heartbeat for so long, a process counts as gone. C++ sends them, whatever Python does."""

FAIL_SECONDS = 3
"""How long a process that fails waits whether the others do too: each reports its own error then."""

SHUTDOWN_SECONDS = 10
"""How long JAX waits for the others at the end of a Python program that has failed."""

_FOREVER_SECONDS = 30 * 24 * 3600
"""JAX ends a wait for a process that is gone."""


class ProcessGroup:
    """The processes of a run, seen from one of them. Entering it connects them; leaving it is done together.

    Args:
        coordinator: HOST:PORT of process 0. What is None, of this and the next two, JAX finds.
        num_processes: how many processes there are.
        process_id: the number of this one.
        join_seconds: how long the processes wait for one another.

    Attributes:
        process: the number of this process, once entered; 0 prints and writes.
        num_processes: how many processes there are, once entered.

    Raises:
        UsageError: from entering, if JAX has started before, the other processes are not described, or
            process 0 cannot listen at its address.
        ClusterError: from entering and leaving, if the others cannot be reached.
    """

    process: int
    num_processes: int

    def __init__(
        self, coordinator: str | None, num_processes: int | None, process_id: int | None, join_seconds: float
    ) -> None:
        self._given = (coordinator, num_processes, process_id)
        self._join_seconds, self._number = join_seconds, 0

    @property
    def leads(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.process == 0

    def __enter__(self) -> Self:
        import jax
        from jax._src.distributed import global_state

        coordinator, _, process = self._given
        listens = _free_address(coordinator) if coordinator is not None and process == 0 else None
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_preemption_service", False)
        try:
            jax.distributed.initialize(
                *self._given,
                cluster_detection_method=None if None in self._given else "deactivate",
                initialization_timeout=int(min(self._join_seconds, _FOREVER_SECONDS)),
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=SHUTDOWN_SECONDS,
                coordinator_bind_address=listens,
            )
        except (RuntimeError, OSError, LookupError, ValueError) as error:
            raise _refused(error) from error
        self._client: Any = global_state.client
        self.process, self.num_processes = global_state.process_id, global_state.num_processes
        try:
            self._agree_on_number()
        except (UsageError, jax.errors.JaxRuntimeError) as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _agree_on_number(self) -> None:
        """Raises UsageError unless process 0 has this count: a missing process sends nothing."""
        self._client.key_value_set(f"wanrun/count/{self.process}", str(self.num_processes))
        for other in range(self.num_processes if self.leads else 1):
            count = int(self._client.blocking_key_value_get(f"wanrun/count/{other}", _FOREVER_SECONDS * 1000))
            if count != self.num_processes:
                raise UsageError(
                    "mismatch",
                    "the processes were given different requests: number of processes",
                    expected=f"{self.num_processes} as process {self.process}",
                    found=f"{count} in process {other}",
                    remedy="give all of them the same options",
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import jax

        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise lost_process(_first_line(error)) from error
        if error is not None and not isinstance(error, WanError):
            return
        name, seconds = ("done", _FOREVER_SECONDS) if error is None else ("failed", FAIL_SECONDS)
        try:
            self._client.wait_at_barrier(name, seconds * 1000)
            jax.distributed.shutdown()
        except jax.errors.JaxRuntimeError as gone:
            if error is None:
                raise lost_process(_first_line(gone)) from gone

    def exchange(self, value: Any) -> list[Any]:
        """Gives a value that JSON can hold to all processes, and returns those of all, by process.

        Every process must make the same calls in the same order, from one thread.
        """
        number, self._number = self._number, self._number + 1
        self._client.key_value_set(f"wanrun/{number}/{self.process}", json.dumps(value))
        names = [f"wanrun/{number}/{process}" for process in range(self.num_processes)]
        values = [
            json.loads(self._client.blocking_key_value_get(name, _FOREVER_SECONDS * 1000)) for name in names
        ]
        if number:  # all have begun this exchange, so all have read the one before
            self._client.key_value_delete(f"wanrun/{number - 1}/{self.process}")
        return values

    def agree_on_artifact(self, facts: Mapping[str, Any]) -> None:
        """Raises ArtifactError in every process unless all have the same artifact and the same target."""
        what, remedy = "the processes have different artifacts", "give all of them the same artifact"
        self._agree(facts, ArtifactError, what, remedy)

    def agree_on_request(self, facts: Mapping[str, Any]) -> None:
        """Raises UsageError in every process unless all are asked for the same."""
        what, remedy = "the processes were given different requests", "give all of them the same options"
        self._agree(facts, UsageError, what, remedy)

    def _agree(self, facts: Mapping[str, Any], kind: type[WanError], what: str, remedy: str) -> None:
        """Raises an error of this kind, in every process, that names the first fact that differs."""
        first, *others = self.exchange(json.loads(json.dumps(facts, default=str)))
        for other, theirs in enumerate(others, 1):
            for name in {**first, **theirs}:
                if (here := first.get(name)) != (there := theirs.get(name)):
                    expected, found = _difference(here, there, other)
                    raise kind("mismatch", f"{what}: {name}", expected=expected, found=found, remedy=remedy)


def local_devices(mesh: Sizes, num_processes: int) -> int:
    """Returns how many of a mesh's devices each process has; raises UsageError if that is not even."""
    total = num_devices(mesh)
    if total % num_processes:
        raise UsageError(
            "mismatch",
            f"the {total} devices of this target's mesh, {mesh_text(normal(mesh))}, cannot be shared evenly",
            expected="a number of processes that divides them",
            found=num_processes,
            remedy="choose another --target, or run wanbuild compile --mesh",
        )
    return total // num_processes


def _free_address(coordinator: str) -> str | None:
    """Returns a loopback address to listen at, None for all devices, once it is free."""
    host, _, port = coordinator.rpartition(":")
    dual = socket.has_dualstack_ipv6()
    try:  # JAX's service would share a port with another one
        found = sorted(socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM))
        if all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found):
            family, *_, address = found[0]
            socket.create_server(address[:2], family=family).close()
            return f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        family = socket.AF_INET6 if dual else socket.AF_INET
        socket.create_server(("", int(port)), family=family, dualstack_ipv6=dual).close()
        return None
    except OSError as error:
        raise UsageError(
            "busy",
            f"process 0 cannot listen at {coordinator}",
            expected="a free port of this host",
            found=error.strerror or error,
            remedy="choose another port for all processes",
        ) from None


def _refused(error: Exception) -> WanError:
    """Returns the error that says why JAX has not connected the processes."""
    from jax.errors import JaxRuntimeError

    text = _first_line(error)
    if "initialise" in text or "only be called once" in text:
        return UsageError(
            "closed",
            "JAX has started in this process, and cannot be connected with others any more",
            expected="no JAX array or device before",
            found=text,
            remedy="join the other processes first",
        )
    if isinstance(error, JaxRuntimeError):
        return ClusterError("process_lost", "JAX cannot connect the processes", found=text)
    return UsageError(
        "unsupported",
        "the processes of this run cannot be found",
        expected="a cluster that JAX knows: a TPU pod, Slurm, Kubernetes or MPI",
        found=text,
        remedy=f"pass {field('coordinator')}, {field('num_processes')}, {field('process_id')}",
    )


def _first_line(error: Exception) -> str:
    return " ".join(str(error).partition("\n")[0].split())


def _difference(here: Any, there: Any, other: int) -> tuple[str, str]:
    """Returns two values that differ, cut before their difference if they are long."""
    texts = [
        value if isinstance(value, str) else json.dumps(value, sort_keys=True) for value in (here, there)
    ]
    same = os.path.commonprefix(texts)  # noqa: RUF071 - of characters
    start = max(0, len(same) - 20) if max(map(len, texts)) > 60 else 0
    cut = [("..." if start else "") + text[start:] for text in texts]
    return f"{shortened(cut[0])} as process 0", f"{shortened(cut[1])} in process {other}"
