"""How far a video is, and when it ends: from what its phases took before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from wanserve.progress import VideoProgress
from wanserve.video import Video

WEIGHT: Final = 0.5
"""Of the newest measurement in the mean of those of a phase."""

GUESSED_STEPS: Final[Mapping[str, float]] = {"text": 1.0, "media": 1.0, "decode": 3.0, "encode": 1.0}
"""What a phase is taken for until it was measured once, in denoising steps."""

GUESSED_STEP: Final = 1.0
"""Seconds of a step until one was measured: only for the share of progress, no end is shown."""


class Estimates:
    """Mean seconds of each phase by model and profile, and by windows, clips, or frames that are not its own.

    ``times`` were measured before, by ``name``.
    """

    def __init__(self, times: Mapping[str, float]) -> None:
        self.times = dict(times)

    @staticmethod
    def name(video: Video, phase: str) -> str:
        """The name of a time: a step's is ``step``, and the tenths of the steps that have guidance."""
        windows, steps = video.shape.get("windows", 1), video.shape["num_steps"]
        kind = f"{video.shape['profile']}*{windows}" if windows > 1 else video.shape["profile"]
        if (frames := video.shape.get("other_frames")) is not None:
            kind = f"{kind}:{frames}"
        name = f"{video.model} {kind} {phase}"
        if phase != "step" or (guided := video.shape.get("guided")) is None:
            return name
        return f"{name} {round(10 * guided / steps)}"

    def learn(
        self, video: Video, seconds: Mapping[str, float], steps: int, shared: float | None = None
    ) -> dict[str, float]:
        """Adds what a video's phases took, in seconds, to the means, and returns the new ones by name.

        Loading, which most videos do not have, is left out. ``steps`` are its denoising steps; ``shared`` is
        for how long its worker had the one before it too, None if it was begun alone.
        """
        if video.live is not None:  # it ends when its client likes
            return {}
        whole = steps >= video.shape["num_steps"]  # else clips were there, and their decoding took no time
        measured = {phase: value for phase, value in seconds.items() if whole and phase in GUESSED_STEPS}
        if steps and "steps" in seconds:
            measured["step"] = seconds["steps"] / steps
        if shared is not None:
            measured["shared"] = shared
        news = dict[str, float]()
        for phase, value in measured.items():
            name = self.name(video, phase)
            before = self.times.get(name, value)
            news[name] = before + WEIGHT * (value - before)
        self.times |= news
        return news

    def known(self, video: Video) -> bool:
        """Whether a video of this kind was measured."""
        return self.name(video, "step") in self.times

    def parts(self, video: Video, steps: int, step: float | None = None) -> dict[str, float]:
        """Returns the expected seconds of each phase of a video with so many denoising steps.

        ``step`` is the seconds that one of its own steps took, if one was made.
        """
        one = step or self.times.get(self.name(video, "step"), GUESSED_STEP)
        parts = dict[str, float]()
        for phase, guess in GUESSED_STEPS.items():
            if phase != "media" or video.media:
                parts[phase] = self.times.get(self.name(video, phase), guess * one)
        return {**parts, "steps": steps * one}

    def total(self, video: Video) -> float | None:
        """Returns the seconds that a waiting video takes in a line; None if none of its kind was measured.

        What it shares with the one before it is left out: so much earlier it begins.
        """
        if video.live is not None or not self.known(video):
            return None
        parts = self.parts(video, video.shape["num_steps"])
        return max(sum(parts.values()) - self.times.get(self.name(video, "shared"), 0.0), parts["steps"])

    def follow(self, progress: VideoProgress, clock: Mapping[str, Any]) -> None:
        """Sets the percent and the remaining seconds of a video that a worker has.

        ``clock`` has the ``phase`` seconds since the phase began, and the ``step`` seconds of one of its own
        steps or None.
        """
        video = progress.video
        if (live := video.live) is not None:
            most = live.frames or live.seconds * video.shape["fps"]
            progress.percent = min(99, int(100 * live.made / most))
            return
        steps = progress.steps or video.shape["num_steps"]
        phase_now = "steps" if 0 < progress.step < steps else progress.phase  # a window's decoding, too
        parts = self.parts(video, steps, clock["step"])
        order = ("media", "text", "steps", "decode", "encode")
        done, left = 0.0, 0.0
        here = order.index(phase_now) if phase_now in order else -1
        for index, phase in enumerate(order):
            seconds = parts.get(phase, 0.0)
            if index < here:
                done += seconds
            elif index == here:
                passed = progress.step / steps * seconds if phase == "steps" else 0.0
                # Between two steps, and in other phases, as far as the clock: never past what is expected.
                room = seconds / steps if phase == "steps" else seconds
                passed += min(clock["phase"], 0.95 * room)
                done, left = done + min(passed, seconds), left + max(seconds - passed, 0.0)
            else:
                left += seconds
        progress.percent = max(progress.percent, min(99, int(100 * done / max(done + left, 1e-9))))
        progress.remaining = left if self.known(video) or clock["step"] else None
