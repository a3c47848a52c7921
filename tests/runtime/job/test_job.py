"""A job is run in one way: who listens hears of it, its files are written, and an outcome is its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wanrun
from helpers.options import generation
from wanrun.errors import CancelledError, UsageError
from wanrun.job.job import Job, run_job
from wanrun.job.outputs import LATENTS, Output
from wanrun.job.progress import Event, Progress
from wanrun.media.write_video import read_metadata
from wanrun.request.generation import Generation


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


def test_a_process_that_writes_nothing() -> None:
    outcome = run(Job("7", generation()))
    assert outcome.sizes == {} and "encode" not in outcome.seconds and outcome.metadata["prompt"] == "a fox"
