"""What is told of a job, from its spans and steps."""

from __future__ import annotations

import threading

import pytest

from wanrun.job.progress import Event, Progress
from wanrun.timing.timings import Timings


def test_it_is_told_from_any_thread() -> None:
    """Parts are loaded by threads of their own."""
    told: list[Event] = []
    progress = Progress("1", told.append)
    with progress.timings.phase("restore", "transformer"):
        threads = [
            threading.Thread(target=lambda: progress.timings.add("transfer", 0.0, 1.0)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with progress.timings.phase("denoise"):
            pass
    phases = [one.phase for one in told]
    assert list(dict.fromkeys(phases)) == ["loading", "steps"] and phases[-1] == "loading"


def test_one_job_of_several_with_the_same_timings() -> None:
    """Each has its own seconds and steps, and hears no more after its end."""
    timings, told = Timings(), list[Event]()
    for number in range(2):
        progress = Progress(str(number), told.append, timings)
        with timings.phase("denoise"):
            timings.steps("step", 2 + number, 1.0)
        taken = timings.labelled_spans[-1]
        assert progress.seconds == {"steps": taken.end - taken.start} and progress.steps == 2 + number
        progress.stop()
    with timings.phase("decode"), timings.phase("live"):
        pass
    own = progress.seconds
    for _ in range(2):
        progress.part(timings)
    assert progress.seconds.keys() == {"steps", "decode"} and progress.steps == 3 + 2 * 5
    assert progress.seconds["decode"] == pytest.approx(3 * own["decode"])
    assert [(one.id, one.phase) for one in told] == [("0", "steps"), ("1", "steps")]
