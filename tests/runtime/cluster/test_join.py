"""``wanrun.join``: what is given is checked before JAX is asked."""

from __future__ import annotations

from typing import Any

import pytest

import wanrun
from helpers.refusals import refuses
from wanrun.errors import UsageError


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
        (("10.0.0.1", 2, 0), "coordinator"),
        (("a:99999", 2, 0), "coordinator"),
        (("10.0.0..1:8476", 2, 0), "coordinator"),
        *(
            ((f"{host}:8476", 2, 0), "coordinator")
            for host in (
                *("x" * 300, "x" * 64, "a\nb", "a b", "\x1b[1m", "é"),
                *(".a", "[]", "[a b]", "a/b", "u@h"),
            )
        ),
        (("a:8476", 1, 0), "num_processes"),
        (("a:8476", 4, 4), "process_id"),
        ((None, None, -1), "process_id"),
    ],
)
def test_a_wrong_description(given: tuple[Any, Any, Any], what: str) -> None:
    with pytest.raises(UsageError, match=f"{what} is "):
        wanrun.join(*given)


@pytest.mark.parametrize("coordinator", ["10.0.0.1:8476", "[::1]:80", "tpu_0-a.b.svc.:1", None])
def test_an_address(coordinator: str | None) -> None:
    wanrun.join(coordinator, 2, 0)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.5])
def test_a_time_that_is_none(seconds: float) -> None:
    with pytest.raises(UsageError):
        wanrun.join("a:1", 2, 0, timeout_seconds=seconds)
