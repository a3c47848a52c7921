"""What a run has to do, found before the work: good lines, bad ones, names, and what is there already."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.fake_pipeline import write_lines
from helpers.media_files import image, make_task
from helpers.refusals import check_refusal
from wancli.jobs.worklist import Worklist
from wanrun.errors import WanError
from wanrun.files import sha256_of
from wanrun.media.write_video import write_video

WorklistOf = Callable[..., Worklist]
LATENTS = (1, 16, 3, 8, 12)


def refusal(worklist_of: WorklistOf, given: dict[str, Any] | None = None, **run: Any) -> WanError:
    with pytest.raises(WanError) as caught:
        worklist_of(given, **run)
    return caught.value


def test_a_prompt_of_the_command_line(worklist_of: WorklistOf, tmp_path: Path) -> None:
    work = worklist_of({"seed": 3}, prompt="a fox")
    (planned,) = work.jobs
    assert planned.entry.where == "" and planned.videos == (tmp_path / "o.npy",)
    assert (work.finished, work.failures, work.noise, work.many) == ([], {}, None, False)
    assert work.media.inputs(planned.job.generation) is None and work.first_prompts() == ["a fox", ""]
    assert planned.job.generation.warnings == ()


def test_without_an_output_a_single_prompt_takes_a_free_name(
    worklist_of: WorklistOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out-2.mp4.parts").mkdir()  # of a run that was ended, which the next such one goes on with
    found = []
    for _ in range(3):
        (job,) = worklist_of({}, prompt="a fox", output=None).jobs
        found += job.videos
        job.videos[0].write_bytes(b"a video")
    assert found == [Path("out.mp4"), Path("out-3.mp4"), Path("out-4.mp4")]
    windows = {"num_frames": 17, "window_frames": 9}
    assert worklist_of(windows, prompt="a fox", output=None).jobs[0].videos == (Path("out-2.mp4"),)
    (job,) = worklist_of({}, prompt="a fox", output=None, overwrite=True).jobs
    assert job.videos == (Path("out.mp4"),)
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "one"})
    assert "out.mp4 exists" in str(worklist_of(prompts=file, output=None).failures[1])


def test_lines_that_can_be_made_and_others(worklist_of: WorklistOf, tmp_path: Path) -> None:
    lines = [
        {"prompt": "one"},
        {"prompt": "two", "seed": -2},
        "[]",
        {"prompt": "four", "negative_prompt": "n"},
    ]
    file = write_lines(tmp_path / "p.jsonl", *lines)  # type: ignore[arg-type]
    work = worklist_of(prompts=file)
    assert [job.entry.index for job in work.jobs] == [1, 4]
    assert [str(failure).partition(": ")[0] for failure in work.failures.values()] == [
        f"{file}:2",
        f"{file}:3",
    ]
    # 100 000 lines compute it once.
    assert work.jobs[0].job.generation.table is work.jobs[1].job.generation.table
    assert work.first_prompts() == ["one", "", "four", "n"] and work.first_prompts(1) == ["one", ""]
    assert work.many


def test_a_bad_prompt_of_the_command_line_ends_the_run(worklist_of: WorklistOf) -> None:
    error = refusal(worklist_of, {"seed": -2}, prompt="a fox")
    assert error.fields == ("seed",) and error.found == "-2"
    check_refusal(refusal(worklist_of), "missing_parameter", remedy="--prompt ")
    both = refusal(worklist_of, prompt="a", prompts=Path("p"))
    check_refusal(both, "conflict", what="--prompt and --prompts ")


def test_initial_latents(worklist_of: WorklistOf, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).standard_normal(LATENTS, np.float32)
    np.save(tmp_path / "z.npy", noise)
    work = worklist_of(prompt="a fox", latents=tmp_path / "z.npy")
    assert work.noise is not None and np.array_equal(work.noise, noise) and work.noise.flags.writeable
    (job,) = work.jobs
    assert job.metadata["latents"] == "z.npy" and job.metadata["seed"] is None
    assert job.metadata["latents_sha256"] == sha256_of(noise.tobytes())
    np.save(tmp_path / "z.npy", noise[0])
    check_refusal(refusal(worklist_of, prompt="a", latents=tmp_path / "z.npy"), "mismatch", what="latents")


def npy_of_shape(size: int) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({size},), }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00v\x00" + header.encode()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"no array", b"\x93NUMPY\x01\x00v\x00{'descr':", b"PK\x03\x04"),
        *(npy_of_shape(size) for size in (-1, 10**20, 2**62, 10**9)),
    ],
)
def test_latents_that_cannot_be_read(worklist_of: WorklistOf, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "z.npy").write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # NumPy leaves a damaged zip file open
        error = refusal(worklist_of, prompt="a fox", latents=tmp_path / "z.npy")
        gc.collect()
    check_refusal(error, "unreadable", what=tmp_path / "z.npy", remedy="float32 .npy")


def test_latents_are_not_written_over(worklist_of: WorklistOf, tmp_path: Path) -> None:
    path = tmp_path / "z.npy"
    np.save(path, np.zeros(LATENTS, np.float32))
    for option in ("output", "save_latents", "timing_json", "report"):
        given = {"output": tmp_path / "o.npy", option: path}
        error = refusal(worklist_of, prompt="a fox", latents=path, overwrite=True, **given)
        check_refusal(error, "exists", what=path)
        assert "--latents" in error.what


def test_files_of_the_run_are_claimed_too(worklist_of: WorklistOf, tmp_path: Path) -> None:
    file, output = write_lines(tmp_path / "p.txt", "one"), tmp_path / "o.npy"
    check_refusal(refusal(worklist_of, prompt="a", timing_json=output), "exists", what="--timing-json")
    check_refusal(refusal(worklist_of, prompt="a", report=output), "exists", what="--report")
    check_refusal(refusal(worklist_of, prompts=file, timing_json=file), "exists", what="--prompts")
    work = worklist_of(prompts=file, timing_json=output)  # a line that cannot be made does not end the run
    (failure,) = work.failures.values()
    assert work.jobs == []
    check_refusal(failure, "exists", what="--timing-json")


def test_media_of_the_command_line_are_checked_once(
    worklist_of: WorklistOf, artifact: Path, tmp_path: Path
) -> None:
    make_task(artifact, "i2v")
    file = write_lines(tmp_path / "p.txt", "one", "two")
    message = str(refusal(worklist_of, {"image": str(tmp_path / "none.png")}, prompts=file))
    assert "none.png" in message and "p.txt" not in message
    picture = str(image(tmp_path / "a.png"))
    work = worklist_of({"image": picture}, prompts=file)
    one, two = work.jobs
    inputs = work.media.inputs(one.job.generation)
    assert inputs is not None and work.media.inputs(two.job.generation) is inputs
    one_line = write_lines(tmp_path / "one.txt", "one")
    (failure,) = worklist_of(
        {"image": picture}, prompts=one_line, output=Path(picture), overwrite=True
    ).failures.values()
    check_refusal(failure, "exists", what=f"{one_line}:1 (image)")


def test_what_all_lines_lack_is_told_once(worklist_of: WorklistOf, tmp_path: Path) -> None:
    """Each line has the same error: it is the command line's, or might as well be."""
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "one"}, {"prompt": "two", "seed": 3})
    error = refusal(worklist_of, {"boundary": 0.5}, prompts=file)
    check_refusal(error, "no_effect", fields=("boundary",))
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "one", "boundary": 0.5}, {"prompt": "two"})
    assert [str(failure)[-3:] for failure in worklist_of(prompts=file).failures.values()] == ["rts"]
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "one"}, {"prompt": "two", "size": "64x64"})
    assert len(worklist_of({"size": "32x32"}, prompts=file).failures) == 2


def test_each_line_draws_its_seed(worklist_of: WorklistOf, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "a", "seed": 1}, {"prompt": "b"}, {"prompt": "c"})
    one, *drawn = (
        planned.job.generation.options["seed"]
        for planned in worklist_of({"seed": "random"}, prompts=file).jobs
    )
    assert one == 1 and drawn[0] != drawn[1]


def paths(work: Worklist) -> list[Path]:
    """The files that are to be written."""
    return [output.path for planned in work.jobs for output in planned.job.outputs]


@pytest.mark.parametrize(
    ("output", "total", "own", "name"),
    [
        ("o.npy", 1, None, "o.npy"),
        ("o.npy", 12, None, "o-03.npy"),
        ("{slug}-{seed}.gif", 12, None, "a-red-fox-5.gif"),
        ("o.npy", 12, "mine-{index}.png", "mine-03.png"),
        ("o.npy", 12, "mine.png", "mine.png"),  # a line's own name is not numbered
    ],
)
def test_names(
    worklist_of: WorklistOf, tmp_path: Path, output: str, total: int, own: str | None, name: str
) -> None:
    lines = [{"prompt": f"other {number}"} for number in range(total)]
    lines[min(2, total - 1)] = {"prompt": "A red fox!", **({"output": str(tmp_path / own)} if own else {})}
    file = write_lines(tmp_path / "p.jsonl", *lines)
    planned = worklist_of({"seed": 5}, prompts=file, output=tmp_path / output).jobs[min(2, total - 1)]
    assert planned.videos == (tmp_path / name,)
    assert [one.path for one in planned.job.outputs] == [tmp_path / name]


def test_names_of_two_lines_differ(worklist_of: WorklistOf, tmp_path: Path) -> None:
    outputs = ({"output": str(tmp_path / name)} for name in ("o-1.gif", "mine.gif"))
    lines = ({"prompt": "a", **own} for own in ({}, *outputs))
    file = write_lines(tmp_path / "p.jsonl", *lines)
    work = worklist_of(prompts=file, save_latents=tmp_path / "z.npy", output=tmp_path / "o.gif")
    names = ("o-1.gif", "z-1.npy", "mine.gif", "z-3.npy")
    assert paths(work) == [tmp_path / name for name in names]
    check_refusal(work.failures[2], "exists", what=f"{file}:1")


def test_what_a_single_prompt_would_replace_is_refused(worklist_of: WorklistOf, tmp_path: Path) -> None:
    """Also the same video: nothing would be made."""
    (planned,) = worklist_of(prompt="a fox").jobs
    facts = {**planned.metadata, "video": 0}
    write_video(np.zeros((9, 64, 96, 3), np.uint8), tmp_path / "o.npy", 16, facts)
    error = refusal(worklist_of, prompt="a fox")
    check_refusal(error, "exists", what="o.npy ", remedy="--overwrite")
    assert paths(worklist_of(prompt="a fox", overwrite=True)) == [tmp_path / "o.npy"]


def test_what_is_there_already_is_finished(worklist_of: WorklistOf, tmp_path: Path) -> None:
    video, latents = tmp_path / "o.npy", tmp_path / "z.npy"
    given = {"prompts": write_lines(tmp_path / "p.txt", "a fox"), "save_latents": latents}
    work = worklist_of(**given)
    assert paths(work) == [video, latents]
    write_video(np.zeros((9, 64, 96, 3), np.uint8), video, 16, {**work.jobs[0].metadata, "video": 0})
    assert paths(worklist_of(**given)) == [latents]  # which are still to be made
    latents.touch()
    work = worklist_of(**given)
    assert not work.jobs and [job.entry.index for job in work.finished] == [1]
    assert paths(worklist_of(**given, overwrite=True)) == [video, latents]
    check_refusal(worklist_of({"seed": 1}, **given).failures[1], "exists", expected="seed 1", found=0)


def test_a_killed_run_does_not_block_its_repeat(worklist_of: WorklistOf, tmp_path: Path) -> None:
    """It leaves a sidecar without its video. One of another run is not replaced unasked."""
    video, sidecar = tmp_path / "o.npy", tmp_path / "o.npy.json"
    (planned,) = worklist_of({"seed": 3}, prompt="a fox").jobs
    sidecar.write_text(json.dumps({**planned.metadata, "video": 0}))
    assert paths(worklist_of({"seed": 3}, prompt="a fox")) == [video]
    error = refusal(worklist_of, {"seed": 4}, prompt="a fox")
    check_refusal(error, "exists", what=sidecar, remedy="--overwrite")
    assert paths(worklist_of({"seed": 4}, prompt="a fox", overwrite=True)) == [video]
    sidecar.unlink()
    sidecar.mkdir()
    for overwrite in (False, True):
        error = refusal(worklist_of, {"seed": 3}, prompt="a fox", overwrite=overwrite)
        check_refusal(error, "wrong_kind", what=sidecar)


def test_a_drawn_seed_is_that_of_the_video_that_is_there(
    worklist_of: Callable[..., Worklist], tmp_path: Path
) -> None:
    prompts, output = tmp_path / "p.jsonl", tmp_path / "v.npy"
    prompts.write_text('{"prompt": "a fox", "seed": "random"}')
    (planned,) = worklist_of(prompts=prompts, output=output).jobs
    assert planned.entry.drawn
    write_video(np.zeros((9, 64, 96, 3), np.uint8), output, 16, {**planned.metadata, "video": 0})
    again = worklist_of(prompts=prompts, output=output)
    assert not again.jobs and again.finished[0].entry.line.seed == planned.entry.line.seed
    (new,) = worklist_of(prompts=prompts, output=output, overwrite=True).jobs
    assert new.entry.line.seed != planned.entry.line.seed
    prompts.write_text('{"prompt": "a cat", "seed": "random"}')
    (failure,) = worklist_of(prompts=prompts, output=output).failures.values()
    check_refusal(failure, "exists", expected='prompt "a cat"', found='"a fox"')
