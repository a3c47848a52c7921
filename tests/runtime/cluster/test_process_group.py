"""What the processes of a run tell one another, and what they ask of JAX. Whole runs: test_mesh.py."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

import wanrun
from helpers.refusals import refuses
from wanrun.cluster.process_group import ProcessGroup, local_devices
from wanrun.errors import ClusterError, UsageError, WanError


class Service:
    """JAX's service: what one process sets, another one waits for."""

    def __init__(self) -> None:
        self.values, self._changed = dict[str, str](), threading.Condition()

    def key_value_set(self, name: str, value: str) -> None:
        with self._changed:
            self.values[name] = value
            self._changed.notify_all()

    def key_value_delete(self, name: str) -> None:
        del self.values[name]

    def blocking_key_value_get(self, name: str, milliseconds: int) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self.values, 10)
            return self.values[name]


def together(count: int, work: Callable[[ProcessGroup], Any]) -> tuple[list[Any], Service]:
    """What ``work`` returns, or the error that it raises, in each process; and what the service has then."""
    service = Service()

    def one(process: int) -> Any:
        group = wanrun.join("a:1", count, process)
        group.process, group.num_processes, group._client = process, count, service
        try:
            return work(group)
        except WanError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count))), service


def test_exchanges_bring_all_values_to_all() -> None:
    def work(group: ProcessGroup) -> list[Any]:
        return [group.exchange(group.process * 10), group.exchange({"leads": group.leads})]

    found, service = together(3, work)
    assert found == [[[0, 10, 20], [{"leads": True}, {"leads": False}, {"leads": False}]]] * 3
    assert len(service.values) == 3  # of the last one alone


def test_all_name_the_same_difference() -> None:
    def work(group: ProcessGroup) -> None:
        group.agree_on_request({"seed": 1, "prompt": "a fox"})
        prompt = "a very long description of a fox in the snow that ends with " + "fd"[group.process == 2]
        group.agree_on_request({"seed": 1, "prompt": prompt})

    (first, *others), _ = together(3, work)
    assert isinstance(first, UsageError) and first.parts["what"].endswith(": prompt")
    assert "f' " in str(first.expected) and "d' " in str(first.found)
    assert list(map(str, others)) == [str(first)] * 2


def test_counts_that_differ() -> None:
    def work(group: ProcessGroup) -> None:
        group.num_processes += group.process
        group._agree_on_number()

    assert [type(one) for one in together(2, work)[0]] == [UsageError] * 2


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ValueError("coordinator_address should be defined."), UsageError),
        (KeyError("SLURM_NTASKS"), UsageError),
        (RuntimeError("distributed.initialize should only be called once."), UsageError),
        (jax.errors.JaxRuntimeError("UNKNOWN: Failed to start RPC server"), ClusterError),
    ],
)
def test_jax_refuses(raised: Exception, kind: type[WanError], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not given it looks for; it gives a process up within 45 s."""
    asked = dict[str, Any]()

    def initialize(*given: object, **options: Any) -> None:
        asked.update(options, given=given)
        raise raised

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    with pytest.raises(kind), wanrun.join(None, 2, 1):
        pass
    assert asked["given"] == (None, 2, 1) and asked["cluster_detection_method"] is None
    assert asked["heartbeat_timeout_seconds"] <= 45
    with pytest.raises(kind), wanrun.join("127.0.0.2:8476", 2, 0):
        pass
    assert asked["cluster_detection_method"] == "deactivate"
    assert asked["coordinator_bind_address"] == "127.0.0.2:8476"


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"cannot listen at {address}"), wanrun.join(address, 2, 0):
            pass


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("UNKNOWN: Gloo AllGather failed: Connection closed by peer", ClusterError),
        ("RESOURCE_EXHAUSTED: Out of memory", jax.errors.JaxRuntimeError),
    ],
)
def test_a_collective_fails_as_another_process_is_gone(text: str, kind: type[Exception]) -> None:
    error = jax.errors.JaxRuntimeError(text)
    with pytest.raises(kind) as caught:
        wanrun.join("a:1", 2, 0).__exit__(type(error), error, None)
        raise error
    assert getattr(caught.value, "exit_code", 1) == (5 if kind is ClusterError else 1)


@pytest.mark.parametrize(("processes", "each"), [(2, 4), (4, 2), (8, 1)])
def test_each_has_an_equal_part(processes: int, each: int) -> None:
    assert local_devices({"data": 2, "context": 4}, processes) == each


@pytest.mark.parametrize("mesh", [{"data": 2, "context": 4}, {}])
def test_a_mesh_that_cannot_be_shared(mesh: dict[str, int]) -> None:
    with refuses("mismatch", found=3, remedy="--target"):
        local_devices(mesh, 3)


# What is given is checked before JAX is asked.


@pytest.mark.parametrize(
    "given",
    [
        {"coordinator": 1},
        {"num_processes": 2.0},
        {"process_id": True},
        {"timeout_seconds": "7"},
        {"timeout_seconds": None},
    ],
)
def test_values_of_another_type(given: dict[str, Any]) -> None:
    with refuses("wrong_type", what=next(iter(given))):
        wanrun.join(**given)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        *(
            ((address, 2, 0), "coordinator")
            for address in (
                *("10.0.0.1", "a:99999", "10.0.0..1:8476"),
                *(f"{host}:8476" for host in ("x" * 300, "x" * 64, "a\nb", "a b", "\x1b[1m", "é")),
                *(f"{host}:8476" for host in (".a", "[]", "[a b]", "a/b", "u@h")),
            )
        ),
        (("a:8476", 1, 0), "num_processes"),
        (("a:8476", 4, 4), "process_id"),
        ((None, None, -1), "process_id"),
        *((("a:1", 2, 0, seconds), "timeout_seconds") for seconds in (float("nan"), float("inf"), 0.5)),
    ],
)
def test_a_wrong_description(given: tuple[Any, ...], what: str) -> None:
    coordinator, num_processes, process_id, *timeout = given
    options = {"timeout_seconds": timeout[0]} if timeout else {}
    with pytest.raises(UsageError) as refused:
        wanrun.join(coordinator, num_processes, process_id, **options)
    assert refused.value.fields == (what,)


@pytest.mark.parametrize("coordinator", ["10.0.0.1:8476", "[::1]:80", "tpu_0-a.b.svc.:1", None])
def test_an_address(coordinator: str | None) -> None:
    wanrun.join(coordinator, 2, 0)
