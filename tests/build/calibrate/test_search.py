"""How schedules are found and judged: fits, the graph of levels, the search, and the curve."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.known_flow import SPREAD, error, exact, fitted, predicted, starts
from helpers.refusals import refuses
from wanbuild.calibrate import search as searching
from wanbuild.calibrate.curve import AXIS, Point, draw, of_schedules
from wanbuild.calibrate.fit import Coefficients, Steps, fit
from wanbuild.calibrate.graph import Recording, products_of
from wanbuild.calibrate.judge import MOST_DB, Mean, mean_of, psnr, t_quantile
from wanbuild.calibrate.prompt_sets import PromptSets
from wanbuild.calibrate.search import BEST, FIRST, FIT, Found, by_prompt, search
from wanrun.artifact.schedules import Schedule
from wanrun.denoising.solvers import solver_table
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


# Distances of videos, and intervals of their means.


def test_psnr() -> None:
    frames = np.full((2, 3, 4, 4, 3), 100, np.uint8)
    assert psnr(frames, frames) == MOST_DB
    assert psnr(frames, frames + 5) == pytest.approx(20 * np.log10(255 / 5))
    assert psnr(np.zeros_like(frames), np.full_like(frames, 255)) == 0


def test_a_mean_and_its_interval() -> None:
    values = np.random.default_rng(3).normal(5, 2, 40)
    found = mean_of(values)
    assert found == mean_of(list(values)) and found.value == pytest.approx(values.mean())
    width = 1.6849 * values.std(ddof=1) / np.sqrt(40)  # of 39 degrees of freedom
    assert found.high - found.value == pytest.approx(width, rel=1e-4)
    assert found.value - found.low == pytest.approx(width, rel=1e-4)
    assert mean_of([2.0, 4.0]) == Mean(3.0, *(pytest.approx(3 + t * 6.313752) for t in (-1, 1)))


def test_one_value_says_nothing_of_others() -> None:
    found = mean_of([3.0])
    assert found == Mean(3.0, -np.inf, np.inf) and str(found) == "3.0 (one prompt)"


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [
        (1, 6.313752),
        (2, 2.919986),
        (3, 2.353363),
        (4, 2.131847),
        (11, 1.795885),
        (30, 1.697261),
        (999, 1.646380),
    ],
)
def test_quantiles_of_student_s_distribution(freedom: int, expected: float) -> None:
    """Beside the table of NIST's handbook of statistical methods, 1.3.6.7.2, with more digits."""
    assert t_quantile(freedom) == pytest.approx(expected, abs=1e-6)
    assert t_quantile(10, 0.95) == pytest.approx(2.228139, abs=1e-6)


# Fitted coefficients: beside the solver's for a flow that is known, and as the device runs them.


LEVELS = (1000.0, 936.0, 833.0, 625.0, 300.0)


def few(count: int) -> Coefficients:
    return fitted(np.array(LEVELS) / 1000, count, lambda x: x[::2])


def test_nearer_than_every_solver_to_videos_that_were_not_seen() -> None:
    """Five steps of this flow, from other noise: at most a third of the error of the best solver."""

    def of(name: str, coefficients: Coefficients | None = None) -> float:
        return error(solver_table(name, 1, 1.0, timesteps=LEVELS, coefficients=coefficients))

    best = min(of(name) for name in ("unipc", "dpm++", "euler"))
    assert of("unipc", few(12)) < best / 3


def test_steps_have_as_many_vectors_as_there_are() -> None:
    found = np.array(few(2))
    assert found.shape == (len(LEVELS), 4)
    assert (found[0, 2:] == 0).all() and found[1, 3] == 0 and found[3:].all()
    assert few(2) == few(2)


def test_a_step_that_is_exact_is_found() -> None:
    """Where the next latents are a combination of what there is, the fit is that combination."""
    rng = np.random.default_rng(1)
    rows = ((0.7, 0.3, 0.0, 0.0), (0.6, 0.5, -0.1, 0.0), (0.4, 0.8, -0.3, 0.1))
    given, noise = starts(3, 3), rng.standard_normal((3, 3, len(SPREAD))).astype(np.float32)
    targets = []
    for number, x in enumerate(given):
        levels, before = list[np.ndarray](), list[np.ndarray]()
        for step, row in enumerate(rows):
            before = [noise[number, step], *before][:3]
            x = sum((w * m for w, m in zip(row[1:], before, strict=False)), row[0] * x).astype(np.float32)
            levels.append(x)
        targets.append(np.stack(levels))
    found = fit(lambda number, step, x: noise[number, step], given, targets, [1, 0.5, 0.2, 0], lambda x: x)
    np.testing.assert_allclose(found, rows, atol=3e-4)  # the ridge's share


# The graph: errors from scalar products, the shortest path, and better levels for a flow that is known.


NODES = np.array([0.99, 0.9, 0.75, 0.6, 0.45, 0.3, 0.15, 0.05])


def vectors(levels: np.ndarray, first: int, count: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each start: latents and predictions at the levels, and the end."""
    given = [exact(start, np.append(levels, 0.0)) for start in starts(first, count)]
    return [
        (one[:-1], np.stack([predicted(x, s) for x, s in zip(one, levels, strict=False)]), one[-1])
        for one in given
    ]


def recording(levels: np.ndarray, count: int = 3) -> Recording:
    return Recording(levels, np.mean([products_of(*one) for one in vectors(levels, 0, count)], axis=0))


def least(given: list[np.ndarray], target: np.ndarray) -> float:
    found, *_ = np.linalg.lstsq(np.stack(given, axis=1), target, rcond=None)
    return float(np.mean((np.stack(given, axis=1) @ found - target) ** 2))


def test_an_error_is_the_least_distance() -> None:
    """Beside least squares over the recorded vectors themselves."""
    runs, found = vectors(NODES, 0, 3), recording(NODES)
    x, m = (np.concatenate([run[kind].astype(np.float64) for run in runs], axis=1) for kind in (0, 1))
    final = np.concatenate([run[2] for run in runs]).astype(np.float64)
    assert found._errors[0, 0, 3] == pytest.approx(least([x[0], m[0]], x[3]), rel=1e-6)
    assert found._errors[1, 2, 5] == pytest.approx(least([x[2], m[2], m[1]], x[5]), rel=1e-6)
    assert found._last[4, 6] == pytest.approx(least([x[6], m[6], m[4]], final), rel=1e-6)
    assert found._errors[2, 2, 5] > 1e20 and found._errors[2, 5, 4] > 1e20 and found._last[6, 4] > 1e20


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_the_path_is_the_shortest(power: float) -> None:
    found = recording(NODES)

    def cost(path: tuple[int, ...]) -> float:
        total = float(found._last[path[-2], path[-1]])
        for place, j in enumerate(path[1:], 1):
            error = found._errors[path[max(0, place - 2)], path[place - 1], j]
            total += error * NODES[j] ** (2 * power)
        return total

    for count in (2, 3, 5, 8):
        paths = [(0, *rest) for rest in combinations(range(1, len(NODES)), count - 1)]
        assert tuple(found.steps(count, power)) == min(paths, key=cost)


def test_levels_for_a_known_flow() -> None:
    """Steps fitted to a grid of shift 12, far from good for this data, lose at least twice as much."""
    levels = solver_table("unipc", 50, 12.0).sigmas[:-1]

    def lost(nodes: list[int]) -> float:
        timesteps = tuple(levels[nodes] * 1000)
        rows = fitted(levels[nodes], 6, lambda x: x)
        return error(solver_table("unipc", 1, 1.0, timesteps=timesteps, coefficients=rows))

    found = recording(levels, 6)
    for count in (5, 8):
        path = found.steps(count, 0.0)
        assert len(path) == count and path[0] == 0 and (np.diff(path) > 0).all()
        assert lost(path) < 0.5 * lost([*np.linspace(0, 49, count).round().astype(int)])


# The curve: what is drawn of schedules, and that it needs a library.


def schedule(steps: int, **measured: float) -> Schedule:
    timesteps = tuple(float(one) for one in np.linspace(1000, 100, steps))
    return Schedule(solver="unipc", timesteps=timesteps, guidance_scale=5.0, measured=measured)


def test_the_lines_of_an_artifact() -> None:
    ends = {"psnr_low": 29.0, "psnr_high": 31.0}
    eight = schedule(8, psnr=40.0, plain_psnr=35.0)
    made = {"8": eight, "4": schedule(4, psnr=30.0, plain_psnr=25.0, **ends), "mine": schedule(6)}
    chosen, plain = of_schedules(made).values()
    assert chosen == [Point(8, 30.0, 29.0, 31.0), Point(16, 40.0)]
    assert plain == [Point(8, 25.0), Point(16, 35.0)]
    assert of_schedules({"mine": schedule(6)}) == {}


@pytest.mark.slow
def test_a_panel_for_each_title(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {"one": [Point(8, 30.0, 29.0, 31.0), Point(16, 40.0, 39.0, 41.0)], "two": [Point(8, 25.0)]}
    picture, wider = draw({"a": lines}, AXIS), draw({"a": lines, "b": lines}, AXIS)
    assert picture == draw({"a": lines}, AXIS)
    found, other = (Image.open(io.BytesIO(one)) for one in (picture, wider))
    assert other.size == (2 * found.size[0], found.size[1])
    assert len(np.unique(np.asarray(found.convert("RGB")).reshape(-1, 3), axis=0)) > 100
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with refuses("not_installed", remedy="pip install matplotlib"):
        draw({"a": lines}, AXIS)
