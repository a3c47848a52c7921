"""When previews are made: while somebody looks, and for less than a hundredth of the time of the steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from wanrun.errors import UsageError
from wanrun.job.previews import Previews


def test_one_in_a_while_and_none_without_a_map() -> None:
    now, shown = [0.0], list[int]()
    previews = Previews(lambda done, frames: shown.append(done), lambda: now[0])

    def step(number: int, seconds: float, cost: float) -> None:
        def frames() -> np.ndarray:
            now[0] += cost
            return np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3)

        now[0] += seconds
        previews.look()
        previews.step(number, cast(Any, SimpleNamespace(preview=frames, tiny=None)))

    for number, (seconds, cost) in enumerate([(1, 0.001), (1.9, 1), (0.2, 0.1), (11.9, 1), (0.2, 0.1)]):
        step(number, seconds, cost)
    assert shown == [0, 2, 4]

    def without() -> np.ndarray:
        raise UsageError("unsupported", "there is no preview")

    previews = Previews(lambda done, frames: shown.append(done))
    previews.look()
    previews.step(1, cast(Any, SimpleNamespace(preview=without, tiny=None)))
    assert len(shown) == 3


@pytest.mark.parametrize(("work", "decoded"), [(0.005, [4, 5]), (0.1, [])])
def test_it_is_decoded_where_that_takes_no_time(work: float, decoded: list[int]) -> None:
    """Not before the steps have taken 480 times as long, and not at all where it is seen once in minutes."""
    now, shown = [0.0], list[tuple[int, str]]()
    previews = Previews(lambda done, frames: shown.append((done, str(frames))), lambda: now[0])
    tiny = SimpleNamespace(steps=work)
    step = cast(Any, SimpleNamespace(preview=lambda: "map", decoded=lambda: "decoded", tiny=tiny))
    for done in range(1, 6):
        now[0] += 3
        previews.look()
        previews.step(done, step)
    assert [number for number, _ in shown] == [1, 2, 3, 4, 5]
    assert [number for number, how in shown if how == "decoded"] == decoded
