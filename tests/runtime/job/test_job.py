"""Jobs are run in one way, one or several in a line; who listens hears of them, and sees previews."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import wanrun
from helpers.options import generation
from wanrun import CancelToken
from wanrun.errors import CancelledError, UsageError
from wanrun.job.job import Job, run_job
from wanrun.job.line import Passed, in_line, passing, run_all
from wanrun.job.outputs import LATENTS, Output
from wanrun.job.previews import Previews
from wanrun.job.progress import Event, Progress
from wanrun.media.write_video import read_metadata
from wanrun.request.generation import Generation
from wanrun.timing.timings import Timings


class Pipeline:
    """Makes two frames in three steps, and lets something happen between two."""

    def __init__(self, happens: Any = lambda: None) -> None:
        self.happens = happens

    def run(self, generation: Generation, *, on_step: Any, timings: Any, warn: Any, **given: Any) -> Any:
        warn("cut off")
        with timings.phase("text"):
            pass
        with timings.phase("denoise"):
            for step in range(1, 4):
                on_step(step, 3)
            timings.steps("step", 3, 0.3)
            self.happens()
        frames = np.full((1, 2, 64, 96, 3), 7, np.uint8)
        options = generation.metadata(None, {})
        return wanrun.Result(frames, np.ones((1, 16, 1, 8, 12), np.float32), options, timings, ("cut off",))


def run(job: Job, **given: Any) -> wanrun.Outcome:
    pipeline: Any = Pipeline(given.pop("happens", lambda: None))
    return run_job(pipeline, job, **given)


def test_what_is_heard_and_written(tmp_path: Path) -> None:
    video, latents = tmp_path / "v.npy", tmp_path / "l.npy"
    job = Job("7", generation(seed=3), (Output(video), Output(latents, kind=LATENTS)))
    heard, warned = list[Event](), list[str]()
    outcome = run(job, progress=Progress("7", heard.append), warn=warned.append, facts={"latents": "n.npy"})
    assert [(one.phase, one.step, one.steps) for one in heard] == [
        ("text", 0, None),
        ("steps", 0, None),
        *(("steps", step, 3) for step in (1, 2, 3)),
        ("encode", 3, 3),
    ]
    assert (outcome.error, outcome.steps, outcome.warnings, warned) == (None, 3, ["cut off"], ["cut off"])
    assert list(outcome.seconds) == ["text", "steps", "encode"]
    assert outcome.sizes == {str(file): file.stat().st_size for file in (video, latents)}
    assert outcome.metadata == {**job.generation.metadata(None, {}), "latents": "n.npy"}
    assert read_metadata(video) == {**outcome.metadata, "video": 0}
    assert np.load(video).shape == (2, 64, 96, 3) and (np.load(latents) == 1).all()
    nothing = run(Job("7", generation()))  # in a process that writes no files
    assert nothing.sizes == {} and "encode" not in nothing.seconds and nothing.metadata["prompt"] == "a fox"


def test_an_error_is_the_outcome(tmp_path: Path) -> None:
    job = Job("7", generation(), (Output(tmp_path / "v.npy"),))

    def fails(error: BaseException) -> Any:
        def happens() -> None:
            raise error

        return happens

    cancelled = CancelledError("cancelled", "it was cancelled")
    outcome = run(job, happens=fails(cancelled))
    assert outcome.error is cancelled and outcome.steps == 3 and outcome.sizes == outcome.metadata == {}
    for bug in (KeyboardInterrupt(), ValueError("a bug")):
        with pytest.raises(type(bug)):
            run(job, happens=fails(bug))
    (tmp_path / "v.npy").write_bytes(b"mine")
    assert isinstance(run(job).error, UsageError) and (tmp_path / "v.npy").read_bytes() == b"mine"
    assert run(job, overwrite=True).error is None


# What is told of a job.


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


# A line of jobs.


class Watched:
    """Jobs that note what happens, and wait where a test lets them."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.may_end = {name: threading.Event() for name in "abc"}

    def job(self, name: str, *, passes: bool = True) -> Callable[[Passed], str]:
        def run(passed: Passed) -> str:
            self.seen.append(f"{name} begins")
            if passes:
                passed()
                assert self.may_end[name].wait(10)
            self.seen.append(f"{name} ends")
            return name

        return run


def test_the_next_one_begins_when_one_has_made_its_steps() -> None:
    watched = Watched()

    def b(passed: Passed) -> str:
        watched.may_end["a"].set()  # not before this one has begun
        return watched.job("b", passes=False)(passed)

    watched.may_end["c"].set()
    assert list(in_line([watched.job("a"), b, watched.job("c")])) == ["a", "b", "c"]
    assert watched.seen.index("b begins") < watched.seen.index("a ends") < watched.seen.index("c begins")


def test_one_that_does_not_say_so_is_waited_for() -> None:
    """And is yielded before another one is taken."""
    watched, made = Watched(), list[str]()

    def jobs() -> Iterator[Callable[[Passed], str]]:
        for name in "ab":
            assert made == ["a"] * (name == "b")
            yield watched.job(name, passes=False)

    for name in in_line(jobs()):
        made.append(name)
    assert made == ["a", "b"]
    assert watched.seen == ["a begins", "a ends", "b begins", "b ends"]


def test_an_error_is_raised_in_its_place_and_the_next_one_is_waited_for() -> None:
    watched = Watched()

    def bad(passed: Passed) -> str:
        passed()
        watched.may_end["b"].set()
        raise ValueError("of the second")

    line = in_line([watched.job("a", passes=False), bad, watched.job("b")])
    assert next(line) == "a"
    with pytest.raises(ValueError, match="of the second"):
        next(line)
    assert "c begins" not in watched.seen


def test_the_next_generation_is_taken_when_the_steps_of_one_are_made() -> None:
    second = threading.Event()

    def run(number: Any, on_step: Any, cancel: Any) -> Any:
        if number == 2:
            second.set()
        on_step(1, 2)
        assert not second.is_set() or number == 2
        on_step(2, 2)
        assert second.wait(10)
        return number, cancel

    pipeline, numbers, cancel = SimpleNamespace(run=run), [1, 2], CancelToken()  # type: Any, Any, CancelToken
    made: Any = list(run_all(pipeline, numbers, cancel=cancel))
    assert made == [(1, cancel), (2, cancel)]
    told = list[str]()
    on_step = passing(lambda: told.append("passed"))
    for step, expected in ((1, []), (2, ["passed"])):
        on_step(step, 2)
        assert told == expected


# When previews are made.


def test_one_in_a_while_and_none_without_a_map() -> None:
    now, shown = [0.0], list[int]()
    previews = Previews(lambda done, frames: shown.append(done), lambda: now[0])

    def step(number: int, seconds: float, cost: float) -> None:
        def frames() -> np.ndarray:
            now[0] += cost
            return np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3)

        now[0] += seconds
        previews.look()
        previews.step(number, cast(Any, SimpleNamespace(preview=frames, tiny=None)))

    for number, (seconds, cost) in enumerate([(1, 0.001), (1.9, 1), (0.2, 0.1), (11.9, 1), (0.2, 0.1)]):
        step(number, seconds, cost)
    assert shown == [0, 2, 4]

    def without() -> np.ndarray:
        raise UsageError("unsupported", "there is no preview")

    previews = Previews(lambda done, frames: shown.append(done))
    previews.look()
    previews.step(1, cast(Any, SimpleNamespace(preview=without, tiny=None)))
    assert len(shown) == 3


@pytest.mark.parametrize(("work", "decoded"), [(0.005, [4, 5]), (0.1, [])])
def test_it_is_decoded_where_that_takes_no_time(work: float, decoded: list[int]) -> None:
    """Not before the steps have taken 480 times as long, and not at all where it is seen once in minutes."""
    now, shown = [0.0], list[tuple[int, str]]()
    previews = Previews(lambda done, frames: shown.append((done, str(frames))), lambda: now[0])
    tiny = SimpleNamespace(steps=work)
    step = cast(Any, SimpleNamespace(preview=lambda: "map", decoded=lambda: "decoded", tiny=tiny))
    for done in range(1, 6):
        now[0] += 3
        previews.look()
        previews.step(done, step)
    assert [number for number, _ in shown] == [1, 2, 3, 4, 5]
    assert [number for number, how in shown if how == "decoded"] == decoded
