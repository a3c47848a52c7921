"""What is going on at this moment."""

from __future__ import annotations

import pytest

from wanrun.timing.activities import Activities
from wanrun.timing.timings import Recorder, Timings


def names(activities: Activities) -> list[tuple[str, str | None]]:
    return [(one.phase, one.label) for one in activities.running]


def test_activities_begin_and_end() -> None:
    activities = Activities()
    with activities.during("text"):
        token = activities.begin("restore", "vae", lambda: (1, 2))
        assert names(activities) == [("text", None), ("restore", "vae")]
        assert activities.running[1].progress is not None and activities.running[1].progress() == (1, 2)
    assert names(activities) == [("restore", "vae")]
    activities.end(token)
    activities.end(token)
    assert names(activities) == []


def test_an_error_ends_an_activity() -> None:
    activities = Activities()
    with pytest.raises(ValueError, match="x"), activities.during("text"):
        raise ValueError("x")
    assert names(activities) == []


def test_a_timing_shows_what_it_times_and_what_its_recorders_do() -> None:
    timings, recorder = Timings(), Recorder()
    with (
        recorder.phase("executables", "prepare"),
        recorder.into(timings),
        timings.phase("text"),
        recorder.into(timings),  # the same twice is told once
    ):
        assert names(timings.activities) == [("executables", "prepare"), ("text", None)]
    assert names(timings.activities) == []
    with recorder.phase("executables"):
        assert names(timings.activities) == []  # nobody listens
