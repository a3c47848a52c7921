"""The jobs of a worklist through one pipeline: made, written, counted; a bad line ends nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from helpers.fake_pipeline import SIZE, Fake, write_lines
from helpers.refusals import refuses
from wancli.jobs.batch import Batch
from wancli.jobs.worklist import Worklist
from wanrun.errors import AdapterError, ArtifactError, UsageError, WanError
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


def batch_of(work: Worklist, timings: Timings | None = None) -> Batch:
    return Batch(work, overwrite=False, timings=timings or Timings())


def ran(
    work: Worklist, pipeline: Any, capsys: pytest.CaptureFixture[str], timings: Timings | None = None
) -> tuple[Batch, list[str], list[str]]:
    """Runs a worklist to its end; returns the batch, and the lines on stdout and stderr."""
    batch = batch_of(work, timings)
    batch.report_worklist()
    batch.run(pipeline)
    batch.report_count()
    out, err = capsys.readouterr()
    return batch, out.splitlines(), err.splitlines()


def test_a_prompt(
    worklist_of: WorklistOf, pipeline: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = worklist_of({"seed": 5}, prompt="a fox", save_latents=tmp_path / "z.npy")
    timings = Timings()
    batch, out, err = ran(work, pipeline, capsys, timings)
    assert batch.exit_code == 0 and err == []
    (line,) = out
    shown = r"\(seed 5, 9 frames of 96x64, 166 kB, \d+\.\d s\)"
    assert re.fullmatch(rf"wrote {tmp_path / 'o.npy'} {shown}", line)
    assert np.load(tmp_path / "o.npy").shape == SIZE and np.load(tmp_path / "z.npy").shape == (1, 2)
    assert read_metadata(tmp_path / "o.npy").items() >= {"seed": 5, "video": 0, "prompt": "a fox"}.items()
    (options,) = pipeline.generations
    assert (options["width"], options["height"], options["num_frames"]) == (96, 64, 9)
    assert options["inputs"] is None and options["latents"] is None
    assert "encode_video" in {span.phase for span in timings.labelled_spans}


@pytest.mark.parametrize(
    "error", [WanError("not_finite", "the latents are not finite"), AdapterError("changed", "it changed")]
)
def test_a_line_that_fails_does_not_end_the_run(
    worklist_of: WorklistOf,
    pipeline: Fake,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: WanError,
) -> None:
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "one"}, {"prompt": "bad"}, "{}", {"prompt": "four"})
    pipeline.happens["bad"] = raising(error)
    batch, out, err = ran(worklist_of(prompts=file), pipeline, capsys)
    assert batch.exit_code == 2  # of the failure that was told first
    assert [line.split(": ")[:2] for line in err] == [["error", f"{file}:3"], ["error", f"{file}:2"]]
    assert err[1].endswith(str(error))
    assert [line.partition(" (")[0] for line in out[:2]] == [
        f"[1/4] wrote {tmp_path / 'o-1.npy'}",
        f"[4/4] wrote {tmp_path / 'o-4.npy'}",
    ]
    assert re.findall(r"\d+", out[2]) == ["2", "0", "2"]  # made, skipped, failed


@pytest.mark.parametrize("error", [ArtifactError("changed", "the weights changed"), KeyboardInterrupt()])
def test_what_concerns_all_lines_ends_the_run(
    worklist_of: WorklistOf,
    pipeline: Fake,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
) -> None:
    pipeline.happens["two"] = raising(error)
    batch = batch_of(worklist_of(prompts=write_lines(tmp_path / "p.txt", "one", "two", "three")))
    with pytest.raises(type(error)):
        batch.run(pipeline)  # type: ignore[arg-type]
    batch.report_count()
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.findall(r"\d+", last) == ["1", "0", "0", "2"]  # made, skipped, failed, not tried
    assert (tmp_path / "o-1.npy").exists()


def test_several_seeds_of_a_prompt(
    worklist_of: WorklistOf, pipeline: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = worklist_of(prompt="a fox", seeds=(4, 2), output=tmp_path / "o-{seed}.npy")
    batch, _, _ = ran(work, pipeline, capsys)
    assert [options["seed"] for options in pipeline.generations] == [4, 2]
    assert (tmp_path / "o-4.npy").exists() and (tmp_path / "o-2.npy").exists()
    assert list(batch.outcomes) == [1, 2]


def test_a_prompt_of_the_command_line_that_fails_ends_the_run(
    worklist_of: WorklistOf, pipeline: Fake
) -> None:
    pipeline.happens["a fox"] = raising(WanError("not_finite", "the latents are not finite"))
    with refuses("not_finite", WanError):
        batch_of(worklist_of(prompt="a fox")).run(pipeline)  # type: ignore[arg-type]


def test_what_is_there_is_told_and_not_made(
    worklist_of: WorklistOf, pipeline: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "p.txt", "one", "two")
    first, _ = worklist_of(prompts=file).jobs
    write_video(np.zeros(SIZE, np.uint8), tmp_path / "o-1.npy", 16, {**first.metadata, "video": 0})
    _, out, _ = ran(worklist_of(prompts=file), pipeline, capsys)
    assert out[0].startswith(f"[1/2] {tmp_path / 'o-1.npy'} ")
    assert re.findall(r"\d+", out[2]) == ["1", "1", "0"]  # made, skipped, failed
    assert pipeline.asked == ["two"]


def test_warnings_name_the_line_that_is_made(
    worklist_of: WorklistOf, pipeline: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "p.txt", "one", "two")
    batch = batch_of(worklist_of(prompts=file))
    pipeline.happens["two"] = lambda: pipeline.warn("cut")
    batch.run(pipeline)  # type: ignore[arg-type]
    batch.warn("ended")
    one, other = capsys.readouterr().err.splitlines()
    assert one == f"warning: {file}:2: cut" and other == "warning: ended"


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
