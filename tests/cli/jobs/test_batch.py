"""The jobs of a worklist through one pipeline: made, written, counted; a run of hours is announced."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import numpy as np
import pytest

from helpers.fake_pipeline import SIZE, Fake, write_lines
from helpers.options import run_options
from helpers.refusals import refuses
from wancli.jobs.batch import Batch
from wancli.jobs.hours import Hours
from wancli.jobs.worklist import Worklist
from wanrun import Event, Outcome
from wanrun.errors import AdapterError, ArtifactError, UsageError, WanError
from wanrun.machine.rates import LONG
from wanrun.media.write_video import read_metadata, write_video
from wanrun.timing.timings import Timings

WorklistOf = Callable[..., Worklist]


def raising(error: BaseException) -> Callable[..., object]:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


@pytest.fixture
def pipeline() -> Fake:
    return Fake(num_videos=1)


def batch_of(work: Worklist) -> Batch:
    return Batch(work, overwrite=False, timings=Timings())


@dataclass
class Ran:
    """A run that has ended: what was printed on both streams."""

    batch: Batch
    out: list[str]
    err: list[str]

    @property
    def counts(self) -> list[int]:
        """The numbers of its last line: made, skipped, failed, and not tried if there are some."""
        return list(map(int, re.findall(r"\d+", self.out[-1])))


@pytest.fixture
def ran(worklist_of: WorklistOf, pipeline: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a worklist to its end, or to an error of this class."""

    def call(given: dict[str, Any] | None = None, ends: type[BaseException] | None = None, **run: Any) -> Ran:
        batch = batch_of(worklist_of(given, **run))
        batch.report_worklist()
        with pytest.raises(ends) if ends else nullcontext():
            batch.run(pipeline)
        batch.report_count()
        out, err = capsys.readouterr()
        return Ran(batch, out.splitlines(), err.splitlines())

    return call


def test_a_prompt(ran: Callable[..., Ran], pipeline: Fake, tmp_path: Path) -> None:
    done = ran({"seed": 5}, prompt="a fox", save_latents=tmp_path / "z.npy")
    assert done.batch.exit_code == 0 and done.err == []
    (line,) = done.out
    shown = r"\(seed 5, 9 frames of 96x64, 166 kB, \d+\.\d s\)"
    assert re.fullmatch(rf"wrote {tmp_path / 'o.npy'} {shown}", line)
    assert np.load(tmp_path / "o.npy").shape == SIZE and np.load(tmp_path / "z.npy").shape == (1, 2)
    assert read_metadata(tmp_path / "o.npy").items() >= {"seed": 5, "video": 0, "prompt": "a fox"}.items()
    (options,) = pipeline.generations
    assert (options["width"], options["height"], options["num_frames"]) == (96, 64, 9)
    assert options["inputs"] is None and options["latents"] is None
    assert "encode" in done.batch.outcomes[1].seconds


@pytest.mark.parametrize(
    "error", [WanError("not_finite", "the latents are not finite"), AdapterError("changed", "it changed")]
)
def test_a_line_that_fails_does_not_end_the_run(
    ran: Callable[..., Ran], pipeline: Fake, tmp_path: Path, error: WanError
) -> None:
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "one"}, {"prompt": "bad"}, "{}", {"prompt": "four"})
    pipeline.happens["bad"] = raising(error)
    done = ran(prompts=file)
    assert done.batch.exit_code == 2  # of the failure that was told first
    assert [line.split(": ")[:2] for line in done.err] == [["error", f"{file}:3"], ["error", f"{file}:2"]]
    assert done.err[1].endswith(str(error))
    assert [line.partition(" (")[0] for line in done.out[:2]] == [
        f"[1/4] wrote {tmp_path / 'o-1.npy'}",
        f"[4/4] wrote {tmp_path / 'o-4.npy'}",
    ]
    assert done.counts == [2, 0, 2]


@pytest.mark.parametrize("error", [ArtifactError("changed", "the weights changed"), KeyboardInterrupt()])
def test_what_concerns_all_lines_ends_the_run(
    ran: Callable[..., Ran], pipeline: Fake, tmp_path: Path, error: BaseException
) -> None:
    pipeline.happens["two"] = raising(error)
    prompts = write_lines(tmp_path / "p.txt", "one", "two", "three")
    assert ran(prompts=prompts, ends=type(error)).counts == [1, 0, 0, 2]
    assert (tmp_path / "o-1.npy").exists()


def test_a_prompt_of_the_command_line_that_fails_ends_the_run(
    ran: Callable[..., Ran], pipeline: Fake
) -> None:
    pipeline.happens["a fox"] = raising(WanError("not_finite", "the latents are not finite"))
    ran(prompt="a fox", ends=WanError)


def test_several_seeds_of_a_prompt(ran: Callable[..., Ran], pipeline: Fake, tmp_path: Path) -> None:
    done = ran(prompt="a fox", seeds=(4, 2), output=tmp_path / "o-{seed}.npy")
    assert [options["seed"] for options in pipeline.generations] == [4, 2]
    assert (tmp_path / "o-4.npy").exists() and (tmp_path / "o-2.npy").exists()
    assert list(done.batch.outcomes) == [1, 2]


def test_what_is_there_is_told_and_not_made(
    ran: Callable[..., Ran], worklist_of: WorklistOf, pipeline: Fake, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "p.txt", "one", "two")
    first, _ = worklist_of(prompts=file).jobs
    write_video(np.zeros(SIZE, np.uint8), tmp_path / "o-1.npy", 16, {**first.metadata, "video": 0})
    done = ran(prompts=file)
    assert done.out[0].startswith(f"[1/2] {tmp_path / 'o-1.npy'} ") and done.counts == [1, 1, 0]
    assert pipeline.asked == ["two"]


def test_warnings_name_the_line_that_is_made(
    ran: Callable[..., Ran], pipeline: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "p.txt", "one", "two")
    pipeline.happens["two"] = lambda: pipeline.warn("cut")
    done = ran(prompts=file)
    done.batch.warn("ended")
    assert done.err == [f"warning: {file}:2: cut"]
    assert capsys.readouterr().err == "warning: ended\n"


def test_a_folder_that_went_meanwhile(worklist_of: WorklistOf, pipeline: Fake, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    work = worklist_of(prompt="a fox", output=tmp_path / "results" / "o.npy")
    (tmp_path / "results").rmdir()
    with refuses("missing_file", what=tmp_path / "results", remedy="mkdir -p"):
        batch_of(work).run(pipeline)  # type: ignore[arg-type]
    assert pipeline.asked == []  # which is found before anything is generated


def test_what_cannot_be_delivered_is_made_by_the_next_run(
    worklist_of: WorklistOf, pipeline: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A video is delivered before the next file is written: latents would refuse the next run."""
    file = write_lines(tmp_path / "p.txt", "one")
    output, latents = f"file://{tmp_path}/v.npy", tmp_path / "z-{index}.npy"
    work = worklist_of(prompts=file, output=output, save_latents=latents)
    assert work.store is not None
    monkeypatch.setattr(
        type(work.store), "put_video", raising(UsageError("invalid_value", "the store does not answer"))
    )
    with work.store:
        batch = batch_of(work)
        batch.run(pipeline)  # type: ignore[arg-type]
    assert batch.exit_code == 2 and not (tmp_path / "z-1.npy").exists()
    assert len(worklist_of(prompts=file, output=output, save_latents=latents).jobs) == 1


def test_a_terminal_that_shows_pictures(
    worklist_of: WorklistOf,
    pipeline: Fake,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first step's is drawn, the next one's so soon is not; it is gone before a line is printed."""
    happened: list[object] = []
    pictures = SimpleNamespace(
        show=lambda frames: happened.append(frames.shape), clear=lambda: happened.append("clear")
    )
    monkeypatch.setattr("wancli.jobs.batch.report", lambda text: happened.append(text.split()[0]))
    step = SimpleNamespace(preview=lambda: np.zeros((3, 8, 12, 3), np.uint8), tiny=None)
    make = pipeline.run

    def run(generation: Any, *, on_step: Callable[..., None], **others: Any) -> Any:
        for done in (1, 2):
            on_step(done, 9, step)
        return make(generation, **others)

    monkeypatch.setattr(pipeline, "run", run)
    work = worklist_of({}, prompt="a fox")
    Batch(work, False, Timings(), pictures=cast(Any, pictures)).run(cast(Any, pipeline))
    assert happened == [(3, 8, 12, 3), "clear", "wrote", "clear"]


# A run of hours.


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
