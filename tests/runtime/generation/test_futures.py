"""What is on its way: told when all of it is there, and what failed is raised."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from wanrun.generation.futures import unfinished, when_done


def futures(count: int) -> list[Future[Any]]:
    return [Future() for _ in range(count)]


def test_all_have_to_succeed() -> None:
    calls: list[int] = []
    first, second = futures(2)
    when_done([first, second], lambda: calls.append(1))
    second.set_result(None)
    assert calls == []
    first.set_result(None)
    assert calls == [1]


def test_what_is_there_already_counts() -> None:
    calls: list[int] = []
    (done,) = futures(1)
    done.set_result(None)
    when_done([done], lambda: calls.append(1))
    assert calls == [1]


@pytest.mark.parametrize("cancelled", [True, False])
def test_one_that_fails_or_is_dropped_is_never_all(cancelled: bool) -> None:
    calls: list[int] = []
    first, second = futures(2)
    when_done([first, second], lambda: calls.append(1))
    if cancelled:
        assert second.cancel()
    else:
        second.set_exception(OSError("gone"))
    first.set_result(None)
    assert calls == []


def test_those_that_are_not_done() -> None:
    first, second, third = futures(3)
    second.set_result(None)
    assert unfinished([first, second, third]) == [first, third]
    assert unfinished([]) == []


def test_the_first_failure_is_raised() -> None:
    first, second, third = futures(3)
    second.set_exception(OSError("gone"))
    third.set_exception(ValueError("worse"))
    with pytest.raises(OSError, match="gone"):
        unfinished([first, second, third])
    assert first.cancel()
    with pytest.raises(CancelledError):
        unfinished([first])
