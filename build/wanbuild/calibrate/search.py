"""Finds the steps that come nearest to converged runs, among candidates that are judged by decoded frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wanbuild.calibrate.fit import Steps
from wanbuild.calibrate.graph import Recording
from wanbuild.calibrate.judge import Mean, mean_of
from wanbuild.calibrate.prompt_sets import PromptSets, prompt_of
from wanbuild.calibrate.runs import Runs
from wanrun.request.prompts_file import Line

POWERS = (0.0, 0.25, 0.5, 1.0, 1.5)
"""Powers of the noise level by which errors count in the paths that are compared."""

FIT = 8
"""The most prompts that coefficients are fitted to. They are four numbers a step, and vectors are long."""

FIRST = 4
"""Prompts with which every candidate is run; the best candidates run with all."""

BEST = 3
"""Candidates that are run with all prompts."""


OWN = "the solver's own steps"
"""The origin of steps that were not chosen."""


@dataclass(frozen=True)
class Found:
    """The result for one number of steps; all figures but ``decided`` are of prompts that decided nothing.

    Args:
        steps: the chosen ones.
        how: where they come from, in words.
        decided: how much nearer the best candidate came with the prompts that decide, in dB.
        chosen: PSNR in dB against the converged runs.
        plain: the same of the solver's own grid.
        gain: the difference, prompt by prompt.
        published: PSNR against the runs with the published steps.
        plain_published: the same of the solver's own grid.
        between: PSNR of the runs with the published steps against the converged ones.
    """

    steps: Steps
    how: str
    decided: Mean
    chosen: Mean
    plain: Mean
    gain: Mean
    published: Mean
    plain_published: Mean
    between: Mean

    @property
    def count(self) -> int:
        """The number of steps."""
        return len(self.steps.timesteps)

    @property
    def better(self) -> bool:
        """Whether it is nearer than the solver's own grid by more than the noise of the deciding prompts."""
        return self.decided.low > 0

    @property
    def verdict(self) -> str:
        """The taken steps and how much nearer they are, if the reporting prompts confirm it."""
        if not self.better:
            return "no steps were surely nearer"
        if self.gain.low > 0:
            return f"{self.how}, {self.gain} dB nearer"
        return f"{self.how}: {self.decided} dB by the prompts that decide, {self.gain} by those that report"


def candidates(runs: Runs, recording: Recording, prompts: PromptSets, steps: int) -> dict[Steps, str]:
    """Returns different steps to compare, with where they come from; the solver's own first."""
    line, fitted_to = prompts.chosen_by[0], prompts.chosen_by[:FIT]
    plain = runs.plain(line, steps)
    found = {plain: OWN}
    nodes = runs.nearest(plain, line)
    if len(set(nodes)) == len(nodes):
        found[runs.fitted(fitted_to, nodes)] = "fitted to the solver's own levels"
    if steps <= recording.count:
        for power in POWERS:
            how = f"fitted to the levels of the graph with power {power:g}"
            found.setdefault(runs.fitted(fitted_to, recording.steps(steps, power)), how)
    return found


def search(runs: Runs, recording: Recording, prompts: PromptSets, steps: int, published: int) -> Found:
    """Chooses ``steps`` steps by the first set of prompts, and judges them by the others.

    ``published`` is the model's own number of steps.
    """
    compared = candidates(runs, recording, prompts, steps)
    plain = next(iter(compared))
    few, all_of_them = prompts.chosen_by[:FIRST], prompts.chosen_by
    first = {one: _mean(runs, one, few) for one in compared}
    best = sorted(compared, key=lambda one: -first[one])[:BEST]
    means = {one: _mean(runs, one, all_of_them) for one in best}
    chosen = max(means, key=means.__getitem__)
    return judged(runs, prompts, plain, chosen, compared[chosen], published)


def judged(runs: Runs, prompts: PromptSets, plain: Steps, chosen: Steps, how: str, published: int) -> Found:
    """Takes the chosen steps, or the solver's own if those are not surely nearer, and measures them.

    ``plain`` are steps of the solver's own grid, ``chosen`` as many others, and ``how`` says in words where
    they come from. The first set of prompts is not used. ``published`` is the model's own number of steps.
    """

    def distances(lines: Sequence[Line], steps: Steps, *beside: int | None) -> np.ndarray:
        return by_prompt(lines, np.array([runs.distances(line, steps, beside) for line in lines]).T)

    (best,), (own,) = (distances(prompts.decided_by, steps, None) for steps in (chosen, plain))
    decided = mean_of(best - own)
    if decided.low <= 0:
        chosen, how = plain, OWN
    lines = prompts.reported_by
    (best, best_published), (own, own_published) = (
        distances(lines, steps, None, published) for steps in (chosen, plain)
    )
    between = by_prompt(lines, [[runs.between(line, published) for line in lines]])
    return Found(
        chosen,
        how,
        decided,
        mean_of(best),
        mean_of(own),
        mean_of(best - own),
        mean_of(best_published),
        mean_of(own_published),
        mean_of(between[0]),
    )


def by_prompt(lines: Sequence[Line], values: Any) -> np.ndarray:
    """Returns values (N, L) by line as means (N, P) by prompt; lines of one prompt differ only in the seed.

    An interval describes other prompts, and two seeds are not two prompts.
    """
    keys = [prompt_of(line) for line in lines]
    groups = [[place for place, key in enumerate(keys) if key == one] for one in keys]
    first = [group for place, group in enumerate(groups) if group[0] == place]
    return np.array([[np.mean([row[place] for place in group]) for group in first] for row in values])


def _mean(runs: Runs, steps: Steps, lines: Sequence[Line]) -> float:
    return float(np.mean([runs.distances(line, steps) for line in lines]))
