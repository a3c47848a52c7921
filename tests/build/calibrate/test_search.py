"""The search: which candidate is taken, and that noise is not called better."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from wanbuild.calibrate import search as searching
from wanbuild.calibrate.prompts import Prompts
from wanbuild.calibrate.search import BEST, FIRST, Found, search
from wanrun.jobs.requests import Line

PLAIN, GOOD, BAD = (1000.0, 500.0), (1000.0, 400.0), (1000.0, 300.0)


class Videos:
    """Distances by timesteps and prompt, in place of runs."""

    def __init__(self, gains: dict[tuple[float, ...], list[float]]) -> None:
        self.gains, self.asked = gains, list[tuple[tuple[float, ...], int]]()

    def distances(
        self, line: Line, timesteps: tuple[float, ...], references: Sequence[int | None] = (None,)
    ) -> list[float]:
        self.asked.append((timesteps, line.seed))
        gains = self.gains[timesteps]
        return [30.0 + line.seed + gains[line.seed % len(gains)]] * len(references)

    def between(self, line: Line, steps: int) -> float:
        return 50.0


def found(monkeypatch: pytest.MonkeyPatch, videos: Videos) -> Found:
    names = {one: str(one[1]) for one in videos.gains}
    monkeypatch.setattr(searching, "candidates", lambda *given: names)
    lines = [structs.replace(Line(prompt="a"), seed=seed) for seed in range(14)]
    recording: Any = SimpleNamespace()
    return search(videos, recording, Prompts(lines[:8], lines[8:]), 2, 30)  # type: ignore[arg-type]


def test_the_best_is_taken_and_judged_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {(1000.0, float(level)): [-5.0] for level in range(10, 60, 10)}
    videos = Videos({PLAIN: [0.0], BAD: [-1.0], GOOD: [2.0, 3.0], **others})
    one = found(monkeypatch, videos)
    assert one.timesteps == GOOD and one.how == "400.0" and one.better and one.steps == 2
    assert one.gain.value == pytest.approx(2.5) and one.chosen.value - one.plain.value == pytest.approx(2.5)
    # The worst are run with the first prompts alone, and the held-out ones by the best and the solver's own.
    seeds = {one: {seed for timesteps, seed in videos.asked if timesteps == one} for one in videos.gains}
    assert seeds[(1000.0, 10.0)] == set(range(FIRST)) and seeds[GOOD] == set(range(14))
    assert sum(len(some) > FIRST for some in seeds.values()) == BEST


def test_what_is_better_by_chance_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = [1.0] * 8 + [-3.0, 3.5, -2.5, 3.0, -3.0, 2.0]  # better where it was chosen, and not held out
    one = found(monkeypatch, Videos({PLAIN: [0.0], GOOD: noisy}))
    assert one.timesteps == PLAIN and not one.better and one.gain.value == 0
    assert one.chosen == one.plain
