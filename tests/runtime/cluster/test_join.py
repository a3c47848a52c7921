"""``wanrun.join``: what is given is taken as it is, and the rest is found."""

from __future__ import annotations

import pytest

import wanrun
from wanrun.cluster import join as joining
from wanrun.cluster.launch import Cluster
from wanrun.errors import UsageError


def test_nothing_is_looked_for_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "found_cluster", None)
    group = wanrun.join("10.0.0.1:8476", 4, 3)
    assert group.cluster == Cluster("10.0.0.1:8476", 4, 3)
    assert (group.process, group.num_processes, group.leads) == (3, 4, False)
    assert wanrun.join("10.0.0.1:8476", 4, 0).leads


def test_the_rest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[object]()

    def found(*given: object) -> Cluster:
        asked.append(given)
        return Cluster("node:1", 2, 1)

    monkeypatch.setattr(joining, "found_cluster", found)
    assert wanrun.join(num_processes=2, timeout_seconds=7).cluster == Cluster("node:1", 2, 1)
    assert asked == [(None, 2, None, 7)]


@pytest.mark.parametrize(
    "given",
    [
        {"coordinator": 1},
        {"num_processes": 2.0},
        {"process_id": True},
        {"timeout_seconds": "7"},
    ],
)
def test_values_of_another_type(given: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(given))} has the wrong type; expected a"):
        wanrun.join(**given)  # type: ignore[arg-type]
