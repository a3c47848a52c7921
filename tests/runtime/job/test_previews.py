"""When previews are made: while somebody looks, and for less than a hundredth of the time of the steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

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
        previews.step(number, cast(Any, SimpleNamespace(preview=frames)))

    for number, (seconds, cost) in enumerate([(1, 0.001), (1.9, 1), (0.2, 0.1), (11.9, 1), (0.2, 0.1)]):
        step(number, seconds, cost)
    assert shown == [0, 2, 4]

    def without() -> np.ndarray:
        raise UsageError("there is no preview")

    previews = Previews(lambda done, frames: shown.append(done))
    previews.look()
    previews.step(1, cast(Any, SimpleNamespace(preview=without)))
    assert len(shown) == 3
