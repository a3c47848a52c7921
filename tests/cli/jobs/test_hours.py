"""A run of hours is announced: from what earlier runs took, or after its first step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click
import pytest

from helpers.run_options import run_options
from wancli.jobs.hours import Hours
from wancli.jobs.worklist import Worklist
from wanrun import Event, Outcome, Timings
from wanrun.machine.rates import LONG

WorklistOf = Callable[..., Worklist]


def hours_of(work: Worklist, **run: Any) -> Hours:
    return Hours(work.artifact, work.jobs, run_options(**run))


def test_a_long_run_is_announced_and_a_terminal_is_asked(
    worklist_of: WorklistOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, lines, asked = worklist_of(prompt="a fox"), list[str](), list[dict[str, Any]]()
    first = hours_of(work)
    first.announce(lines.append)
    assert first.expected is None and lines == []
    seconds = {"steps": 7200.0, "decode": 3600.0}
    for steps in (1, 2):  # of a video whose first clip was there nothing is learned
        assert hours_of(work).expected is None
        first.learn(work.jobs[0].job.id, Outcome(id="1", seconds=seconds, elapsed=10800.0, steps=steps))
    assert hours_of(work).expected == pytest.approx(10800.0)
    longer = worklist_of({"num_steps": 4}, prompt="a fox")  # the other part is as fast as it was
    assert 17000 < (hours_of(longer).expected or 0.0) < 18100
    windows = worklist_of({"num_frames": 17, "window_frames": 9}, prompt="a fox")
    begun = replace(windows, jobs=[replace(one, parts=1) for one in windows.jobs])
    assert (
        0 < 2 * (hours_of(begun).expected or 0.0) < (hours_of(windows).expected or 0.0)
    )  # without its steps
    done = replace(work, jobs=[replace(one, parts=1) for one in work.jobs])
    assert hours_of(done).expected == 0.0  # only its file was not written
    hours_of(work).announce(lines.append)
    assert len(lines) == 1 and all(word in lines[0] for word in ("3.0 h", "--size", "--steps", "GPU"))

    monkeypatch.setattr(click, "confirm", lambda text, **how: asked.append(how))
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    hours_of(work, yes=True).announce(lines.append)
    assert asked == []
    hours_of(work).announce(lines.append)
    monkeypatch.setattr(sys, "stdin", None)  # it is closed
    hours_of(work).announce(lines.append)
    assert [one["abort"] for one in asked] == [True]


def test_the_first_step_says_what_nothing_has_said_before(worklist_of: WorklistOf) -> None:
    work, lines, timings = worklist_of({"num_steps": 3}, prompt="a fox"), list[str](), Timings()
    hours = hours_of(work)
    hours.step(Event(work.jobs[0].job.id, "steps"), timings, lines.append)
    timings.steps("step", 1, LONG)
    for step in (1, 2):
        hours.step(Event(work.jobs[0].job.id, "steps", step, 3), timings, lines.append)
    assert len(lines) == 1 and "40 min" in lines[0]
    more = hours_of(work)
    more.step(Event(work.jobs[0].job.id, "steps", 10, 12), timings, lines.append)  # of windows that were read
    assert "40 min" in lines.pop()
    quick = hours_of(work)
    timings.step_seconds[0] = LONG / 3
    quick.step(Event(work.jobs[0].job.id, "steps", 1, 3), timings, lines.append)
    assert len(lines) == 1
