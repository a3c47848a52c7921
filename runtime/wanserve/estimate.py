"""How far a job is, and when it ends: from what its phases took before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from wanserve.job import Job, Live

WEIGHT: Final = 0.5
"""Of the newest measurement in the mean of those of a phase."""

GUESSED_STEPS: Final[Mapping[str, float]] = {"text": 1.0, "media": 1.0, "decode": 3.0, "encode": 1.0}
"""What a phase is taken for until it was measured once, in denoising steps."""

GUESSED_STEP: Final = 1.0
"""Seconds of a step until one was measured: for the share of progress alone, no end is told."""


class Estimates:
    """Mean seconds of each phase by model and profile.

    Args:
        times: what was measured before, by ``name``.
    """

    def __init__(self, times: Mapping[str, float]) -> None:
        self.times = dict(times)

    @staticmethod
    def name(job: Job, phase: str) -> str:
        """The name of a time: a step's is ``step``."""
        return f"{job.model} {job.shape['profile']} {phase}"

    def learn(self, job: Job, seconds: Mapping[str, float], steps: int) -> dict[str, float]:
        """Takes what a job's phases took, and returns the new means by name.

        Args:
            job: the job.
            seconds: by phase; loading, which most jobs have not, is left out.
            steps: its denoising steps.
        """
        measured = {phase: value for phase, value in seconds.items() if phase in GUESSED_STEPS}
        if steps and "steps" in seconds:
            measured["step"] = seconds["steps"] / steps
        news = dict[str, float]()
        for phase, value in measured.items():
            name = self.name(job, phase)
            before = self.times.get(name, value)
            news[name] = before + WEIGHT * (value - before)
        self.times |= news
        return news

    def known(self, job: Job) -> bool:
        """Whether a job of this kind was measured."""
        return self.name(job, "step") in self.times

    def parts(self, job: Job, steps: int, step: float | None = None) -> dict[str, float]:
        """Returns the expected seconds of each phase of a job.

        Args:
            job: the job.
            steps: its denoising steps.
            step: seconds of a step of its own, if one was made.
        """
        one = step or self.times.get(self.name(job, "step"), GUESSED_STEP)
        parts = dict[str, float]()
        for phase, guess in GUESSED_STEPS.items():
            if phase != "media" or job.media:
                parts[phase] = self.times.get(self.name(job, phase), guess * one)
        return {**parts, "steps": steps * one}

    def total(self, job: Job) -> float | None:
        """Returns the seconds that a waiting job takes; None if none of its kind was measured."""
        return sum(self.parts(job, job.shape["num_steps"]).values()) if self.known(job) else None

    def follow(self, job: Job, live: Live, clock: Mapping[str, Any]) -> None:
        """Sets the progress and the remaining seconds of a running job.

        Args:
            job: the job.
            live: what is known of it; its progress never falls.
            clock: ``phase`` seconds since the phase began, and ``step`` seconds of a step of its own or None.
        """
        steps = live.steps or job.shape["num_steps"]
        parts = self.parts(job, steps, clock["step"])
        order = ("media", "text", "steps", "decode", "encode")
        done, left = 0.0, 0.0
        here = order.index(live.phase) if live.phase in order else -1
        for index, phase in enumerate(order):
            seconds = parts.get(phase, 0.0)
            if index < here:
                done += seconds
            elif index == here:
                passed = live.step / steps * seconds if phase == "steps" else 0.0
                # Between two steps, and in other phases, as far as the clock: never past what is expected.
                room = seconds / steps if phase == "steps" else seconds
                passed += min(clock["phase"], 0.95 * room)
                done, left = done + min(passed, seconds), left + max(seconds - passed, 0.0)
            else:
                left += seconds
        live.progress = max(live.progress, min(99, int(100 * done / max(done + left, 1e-9))))
        live.remaining = left if self.known(job) or clock["step"] else None
