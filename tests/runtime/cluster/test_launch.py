"""Who is in a run of several processes: as given, and as JAX finds it."""

from __future__ import annotations

from typing import Any

import pytest

from wanrun.cluster.join import join
from wanrun.cluster.launch import Cluster
from wanrun.errors import UsageError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("10.0.0.1", 2, 0), r"coordinator is not an address; expected HOST:PORT .* found '10.0.0.1'"),
        (("a:99999", 2, 0), "coordinator is not an address"),
        (("10.0.0..1:8476", 2, 0), r"coordinator is not an address; .* found '10\.0\.0\.\.1:8476'"),
        *(
            ((f"{host}:8476", 2, 0), "coordinator is not an address")
            for host in (
                "x" * 300,
                "x" * 64,
                "a\nb",
                "a b",
                "\x1b[1m",
                "é",
                ".a",
                "[]",
                "[a b]",
                "a/b",
                "u@h",
            )
        ),
        (("a:8476", 1, 0), "num_processes is out of range; expected 2 to 1024; found 1"),
        (("a:8476", 4, 4), "process_id is out of range; expected 0 to 3; found 4"),
    ],
)
def test_a_wrong_description(given: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Cluster(*given)


@pytest.mark.parametrize(
    ("coordinator", "address"),
    [
        ("10.0.0.1:8476", ("10.0.0.1", 8476)),
        ("[::1]:80", ("::1", 80)),
        ("tpu_0-a.b.svc.:1", ("tpu_0-a.b.svc.", 1)),
    ],
)
def test_an_address(coordinator: str, address: tuple[str, int]) -> None:
    assert Cluster(coordinator, 2, 0).address == address


def test_a_cluster_that_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "OMPI_MCA_orte_hnp_uri"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        UsageError, match=r"cannot be found; expected a cluster that JAX knows; .* pass coord"
    ):
        join(timeout_seconds=1)


def test_a_cluster_that_slurm_describes(monkeypatch: pytest.MonkeyPatch) -> None:
    described = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "node[001-002]",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
    }
    for name, value in described.items():
        monkeypatch.setenv(name, value)
    assert join().cluster == Cluster("node001:61517", 2, 1, (0,))
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0,1,2,3")
    assert join().cluster.local_device_ids == (0, 1, 2, 3)
