"""JAX in several processes: how many devices each opens. Whole runs are in commands/test_distributed.py."""

from __future__ import annotations

import pytest

from wanrun.cluster.jax_service import local_devices
from wanrun.cluster.launch import Cluster
from wanrun.cluster.process_group import ProcessGroup
from wanrun.errors import UsageError


def group(processes: int) -> ProcessGroup:
    return ProcessGroup(Cluster("127.0.0.1:1", processes, 0))


@pytest.mark.parametrize(("processes", "each"), [(2, 4), (4, 2), (8, 1)])
def test_each_has_an_equal_part(processes: int, each: int) -> None:
    assert local_devices({"data": 2, "context": 4}, group(processes)) == each


@pytest.mark.parametrize("mesh", [{"data": 2, "context": 4}, {}])
def test_a_mesh_that_cannot_be_shared(mesh: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"cannot be shared evenly; .* that divides them; found 3; .*--mesh"):
        local_devices(mesh, group(3))
