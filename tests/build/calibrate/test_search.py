"""The search: which candidate is taken, and that noise is not called better."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from wanbuild.calibrate import search as searching
from wanbuild.calibrate.fit import Steps
from wanbuild.calibrate.prompt_sets import PromptSets
from wanbuild.calibrate.search import BEST, FIRST, FIT, Found, by_prompt, search
from wanrun.request.prompts_file import Line

PLAIN, GOOD, BAD = (Steps((1000.0, level)) for level in (500.0, 400.0, 300.0))


class Videos:
    """Distances by steps and prompt, in place of runs."""

    def __init__(self, gains: dict[Steps, list[float]]) -> None:
        self.gains, self.asked = gains, list[tuple[Steps, int]]()

    def distances(self, line: Line, steps: Steps, references: Sequence[int | None] = (None,)) -> list[float]:
        self.asked.append((steps, line.seed))
        gains = self.gains[steps]
        return [30.0 + line.seed + gains[line.seed % len(gains)]] * len(references)

    def between(self, line: Line, steps: int) -> float:
        return 50.0


def found(monkeypatch: pytest.MonkeyPatch, videos: Videos) -> Found:
    names = {one: str(one.timesteps[1]) for one in videos.gains}
    monkeypatch.setattr(searching, "candidates", lambda *given: names)
    lines = [Line(prompt=f"prompt {seed}", seed=seed) for seed in range(20)]
    recording: Any = SimpleNamespace()
    prompts = PromptSets(lines[:8], lines[8:14], lines[14:])
    return search(videos, recording, prompts, 2, 30)  # type: ignore[arg-type]


def test_the_best_is_taken_and_judged_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {Steps((1000.0, float(level))): [-5.0] for level in range(10, 60, 10)}
    videos = Videos({PLAIN: [0.0], BAD: [-1.0], GOOD: [2.0, 3.0], **others})
    one = found(monkeypatch, videos)
    assert one.steps == GOOD and one.how == "400.0" and one.better and one.count == 2
    assert one.verdict.startswith("400.0, 2.5 (") and one.verdict.endswith(" dB nearer")
    assert one.gain.value == pytest.approx(2.5) and one.chosen.value - one.plain.value == pytest.approx(2.5)
    # The worst are run with the first prompts alone, and those that judge by the best and the solver's own.
    seeds = {one: {seed for steps, seed in videos.asked if steps == one} for one in videos.gains}
    assert seeds[Steps((1000.0, 10.0))] == set(range(FIRST)) and seeds[GOOD] == set(range(20))
    assert sum(len(some) > FIRST for some in seeds.values()) == BEST


def test_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver's own steps, and fits to their levels and to those of every power, each once."""
    lines = [Line(prompt=f"prompt {seed}", seed=seed) for seed in range(12)]

    def fitted(given: Sequence[Line], nodes: Sequence[int]) -> Steps:
        assert given == lines[:FIT]
        return Steps(tuple(map(float, nodes)), ((0.5, 0.5, 0.0, 0.0),) * len(nodes))

    paths = {power: [0, 5 + min(2, place)] for place, power in enumerate(searching.POWERS)}
    runs: Any = SimpleNamespace(plain=lambda line, steps: PLAIN, nearest=lambda *given: [0, 4], fitted=fitted)
    recording: Any = SimpleNamespace(count=10, steps=lambda steps, power: paths[power])
    found = searching.candidates(runs, recording, PromptSets(lines, [], []), 2)
    assert [one.timesteps for one in found] == [PLAIN.timesteps, (0, 4), (0, 5), (0, 6), (0, 7)]
    assert [one.coefficients is None for one in found] == [True, False, False, False, False]
    assert found[PLAIN] == searching.OWN and "power 0" in [*found.values()][2]
    runs.nearest = lambda *given: [4, 4]  # more steps than nodes there
    recording.count = 1
    assert [*searching.candidates(runs, recording, PromptSets(lines, [], []), 2)] == [PLAIN]


@pytest.mark.parametrize("deciding", [[-3.0, 3.5, -2.5, 3.0, -3.0, 2.0], [0.1, 3.0, 0.2, 0.1, 0.0, -0.2]])
def test_what_is_better_by_chance_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, deciding: list[float]
) -> None:
    """Better where it was chosen, and with the last six; the others decide: once one prompt alone is."""
    one = found(monkeypatch, Videos({PLAIN: [0.0], GOOD: [1.0] * 8 + deciding + [2.0] * 6}))
    assert one.steps == PLAIN and not one.better and one.gain.value == 0
    assert one.chosen == one.plain


def test_the_last_prompts_report_and_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are steps called nearer that were, by the prompts that decide, and are not by those that report."""
    gains = [1.0] * 8 + [2.0, 2.5, 2.0, 2.5, 2.0, 2.5] + [-2.0, -1.0] * 3
    one = found(monkeypatch, Videos({PLAIN: [0.0], GOOD: gains}))
    assert one.steps == GOOD and one.better and "nearer" not in one.verdict
    assert one.decided.value == pytest.approx(2.25) and one.gain.value == pytest.approx(-1.5)


def test_two_seeds_of_a_prompt_are_one_value() -> None:
    lines = [Line(prompt=prompt, seed=seed) for seed, prompt in enumerate("aabbcc")]
    assert by_prompt(lines, [[1, 3, 5, 5, 0, 4], [0] * 6]).tolist() == [[2, 5, 2], [0, 0, 0]]
