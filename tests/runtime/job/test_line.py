"""A line of jobs: who begins when, what is yielded in which order, and the end by an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from wanrun import CancelToken
from wanrun.job.line import Passed, in_line, run_all


class Watched:
    """Jobs that note what happens, and wait where a test lets them."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.may_end = {name: threading.Event() for name in "abc"}

    def job(self, name: str, *, passes: bool = True) -> Callable[[Passed], str]:
        def run(passed: Passed) -> str:
            self.seen.append(f"{name} begins")
            if passes:
                passed()
                assert self.may_end[name].wait(10)
            self.seen.append(f"{name} ends")
            return name

        return run


def test_the_next_one_begins_when_one_has_made_its_steps() -> None:
    watched = Watched()

    def b(passed: Passed) -> str:
        watched.may_end["a"].set()  # not before this one has begun
        return watched.job("b", passes=False)(passed)

    watched.may_end["c"].set()
    assert list(in_line([watched.job("a"), b, watched.job("c")])) == ["a", "b", "c"]
    assert watched.seen.index("b begins") < watched.seen.index("a ends") < watched.seen.index("c begins")


def test_one_that_does_not_say_so_is_waited_for() -> None:
    watched = Watched()
    assert list(in_line(watched.job(name, passes=False) for name in "ab")) == ["a", "b"]
    assert watched.seen == ["a begins", "a ends", "b begins", "b ends"]


def test_an_error_is_raised_in_its_place_and_the_next_one_is_waited_for() -> None:
    watched = Watched()

    def bad(passed: Passed) -> str:
        passed()
        watched.may_end["b"].set()
        raise ValueError("of the second")

    line = in_line([watched.job("a", passes=False), bad, watched.job("b")])
    assert next(line) == "a"
    with pytest.raises(ValueError, match="of the second"):
        next(line)
    assert "c begins" not in watched.seen


def test_the_next_generation_is_taken_when_the_steps_of_one_are_made() -> None:
    second = threading.Event()

    def run(number: Any, on_step: Any, cancel: Any) -> Any:
        if number == 2:
            second.set()
        on_step(1, 2)
        assert not second.is_set() or number == 2
        on_step(2, 2)
        assert second.wait(10)
        return number, cancel

    pipeline, numbers, cancel = SimpleNamespace(run=run), [1, 2], CancelToken()  # type: Any, Any, CancelToken
    made: Any = list(run_all(pipeline, numbers, cancel=cancel))
    assert made == [(1, cancel), (2, cancel)]
