"""The time of a run of hours: announced before it from earlier runs' times, or after its first step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import click

from wancli.jobs.planned import Planned
from wancli.jobs.run_options import RunOptions
from wanrun import Artifact, Event, Outcome, Timings
from wanrun.artifact.cost import cost_of
from wanrun.artifact.roles import Counts
from wanrun.artifact.select import SelectedTarget, select_target
from wanrun.errors import ArtifactError
from wanrun.machine.rates import LONG, Rates
from wanrun.request.generation import Generation
from wanrun.units import in_hours


class Hours:
    """The expected time of a run's jobs."""

    def __init__(self, artifact: Artifact, jobs: Sequence[Planned], run: RunOptions) -> None:
        self._artifact, self._run = artifact, run
        self._jobs = {one.job.id: one for one in jobs}
        self._announced = False
        self._targets = dict[str, SelectedTarget | None]()  # by profile
        self._times = dict[tuple[Any, ...], float | None]()  # by profile and work: jobs may be thousands

    @cached_property
    def expected(self) -> float | None:
        """Seconds that all jobs take, by the times of earlier runs here; None if that is not known."""
        total = None
        for planned in self._jobs.values():
            if (seconds := self._seconds(planned)) is None:
                return None
            total = seconds + (total or 0.0)
        return total

    def announce(self, note: Callable[[str], object]) -> None:
        """Says before a long run how long it takes; on a terminal asks whether to begin, unless ``--yes``.

        Without a terminal to answer on, the run begins: it was started on purpose, and this is an estimate.
        Raises click.Abort if the answer is no.
        """
        if self.expected is None or self.expected < LONG:
            return
        self._announced = True
        note(f"about {in_hours(self.expected)} on this machine; {self._less()}")
        if not self._run.yes and all(one is not None and one.isatty() for one in (sys.stdin, sys.stderr)):
            click.confirm("begin?", default=True, abort=True, err=True)

    def step(self, event: Event, timings: Timings, note: Callable[[str], object]) -> None:
        """Says after the first step how long the rest takes, if that is long and was not said before."""
        if self._announced or event.step < 1 or event.steps is None or not timings.step_seconds:
            return
        self._announced = True
        others = (self._left(one).told_steps for id, one in self._jobs.items() if id != event.id)
        left = timings.step_seconds[0] * (event.steps - event.step + sum(others))
        if left >= LONG:
            note(f"about {in_hours(left)} of steps are left; {self._less()}")

    def learn(self, id: str, outcome: Outcome) -> None:
        """Records how fast the programs of a job were, for later runs.

        Nothing is learned of one with other steps than were counted: windows were read.
        """
        planned = self._jobs[id]
        generation, left = planned.job.generation, self._left(planned)
        if 0 < outcome.steps == left.told_steps and (selected := self._target(generation)) is not None:
            self._rates(generation, selected).learn(_work(generation, left, selected.name), outcome.seconds)

    @staticmethod
    def _left(planned: Planned) -> Counts:
        """Returns the work that is left, where an ended run has made parts of the video."""
        return planned.job.generation.counts().after(planned.parts)

    def _seconds(self, planned: Planned) -> float | None:
        generation, left = planned.job.generation, self._left(planned)
        if not left.windows:
            return 0.0  # all clips are there
        if not left.known or (selected := self._target(generation)) is None:
            return None
        work = _work(generation, left, selected.name)
        kind = (generation.profile.name, *work.items())
        if kind not in self._times:
            self._times[kind] = self._rates(generation, selected).seconds(work)
        return self._times[kind]

    def _target(self, generation: Generation) -> SelectedTarget | None:
        """Returns the target that a job runs on; None if there is none, which loading says."""
        loading, profile = self._run.loading, generation.profile
        if profile.name not in self._targets:
            self._targets[profile.name] = None
            with contextlib.suppress(ArtifactError):
                self._targets[profile.name] = select_target(
                    self._artifact, profile, loading.target, loading.allow_compile
                )
        return self._targets[profile.name]

    @staticmethod
    def _rates(generation: Generation, selected: SelectedTarget) -> Rates:
        """Returns the rates that programs of such weights reach here: those of small models are far lower."""
        facts = {
            "target": selected.name,
            "mesh": dict(selected.mesh),
            "dtype": generation.profile.options.dtype,
            "weights": sum(one.nbytes for one in generation.manifest.components.values()),
        }
        return Rates.of(selected.target.environment, **facts)

    def _less(self) -> str:
        """Returns a text about options that take less time."""
        ways = ["a smaller --size", "fewer --frames", "fewer --steps"]
        generations = [one.job.generation for one in self._jobs.values()]
        names = {one.profile.name for one in generations}
        targets = [self._target(one) for one in generations]
        if any(one is not None and one.target.environment["platform"] == "cpu" for one in targets):
            ways.append("a GPU")
        built = [name for name in self._artifact.manifest.profiles if name not in names]
        also = f" (built: {', '.join(built)})" if built else ""
        return f"{', '.join(ways[:-1])} or {ways[-1]} take less{also}"


def _work(generation: Generation, left: Counts, target: str) -> Mapping[str, float]:
    """Returns the FLOPs of the phases that an outcome times; nothing is learned of the text encoder's."""
    parts = cost_of(left, generation.manifest, generation.profile).parts.get(target, {})
    steps = parts.get("expert", 0.0) + parts.get("steps", 0.0)
    return {name: one for name, one in (("steps", steps), ("decode", parts.get("video", 0.0))) if one}
