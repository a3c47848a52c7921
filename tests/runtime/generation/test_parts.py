"""Clips of a video: each is what its last frame before makes alone, and a run that was ended goes on."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.damage import Refused, one_error
from helpers.options import PROFILE
from helpers.pictures import picture
from wanrun.artifact.manifest import read_manifest
from wanrun.denoising.noise import clip_seed
from wanrun.errors import NoSpaceError, UsageError
from wanrun.generation.load import load
from wanrun.generation.parts import Parts, Spool, remove_spool, spool_of
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.result import Result
from wanrun.media.prepare import load_media
from wanrun.media.types import Media

Toys = Callable[[str], tuple[Path, Path]]
LENGTH, CLIPS = 9, 3
OPTIONS: dict[str, Any] = {"prompt": "a fox", "negative_prompt": "", "num_steps": 2, "seed": 5}


@pytest.fixture(scope="module")
def toy(media_toy: Toys) -> Path:
    """A model whose first image goes to an image encoder too."""
    return media_toy("wan2.1-i2v")[1]


@pytest.fixture(scope="module")
def pipeline(toy: Path) -> Any:
    with load(toy, prompts=[OPTIONS["prompt"], ""]) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def clips(pipeline: Pipeline) -> Result:
    return pipeline.generate(**OPTIONS, clips=CLIPS, media=Media(image=picture(90, 70)))


def test_a_clip_is_made_of_the_last_frame_with_the_first_image_as_anchor(
    toy: Path, pipeline: Pipeline, clips: Result, tmp_path: Path
) -> None:
    inputs = load_media(read_manifest(toy), pipeline.profile, Media(image=picture(90, 70)))
    alone = [pipeline.generate(**OPTIONS, inputs=inputs, spool=tmp_path / "unused").frames[0]]
    for clip in range(1, CLIPS):
        chained = replace(inputs, arrays={**inputs.arrays, "image": alone[-1][-1:]})
        options = {**OPTIONS, "seed": clip_seed(OPTIONS["seed"], clip)}
        alone.append(pipeline.generate(**options, inputs=chained).frames[0])
    joined = np.concatenate([alone[0], *(frames[1:] for frames in alone[1:])])
    np.testing.assert_array_equal(clips.frames[0], joined)
    facts = clips.options
    assert (facts["num_frames"], facts["clip_frames"]) == (CLIPS * (LENGTH - 1) + 1, LENGTH)
    assert not (tmp_path / "unused").exists()  # a video that is made at once has no parts
    assert facts["clip_seeds"] == [clip_seed(OPTIONS["seed"], clip) for clip in range(CLIPS)]


def test_what_an_ended_run_has_made_is_not_made_again(
    pipeline: Pipeline, clips: Result, tmp_path: Path
) -> None:
    folder, steps = tmp_path / "spool", OPTIONS["num_steps"]
    given: dict[str, Any] = {
        **OPTIONS,
        "clips": CLIPS,
        "media": Media(image=picture(90, 70)),
        "spool": folder,
    }

    def end_in_the_last(done: int, total: int) -> None:
        assert total == steps * CLIPS
        if done > steps * (CLIPS - 1):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        pipeline.generate(**given, on_step=end_in_the_last)
    told = list[int]()
    again = pipeline.generate(**given, on_step=lambda done, total: told.append(done))
    assert told[-steps:] == [*range(steps * (CLIPS - 1) + 1, steps * CLIPS + 1)] and len(told) <= steps + 1
    np.testing.assert_array_equal(again.frames, clips.frames)
    np.testing.assert_array_equal(again.latents, clips.latents)
    assert isinstance(again.frames, np.memmap)
    with pytest.raises(UsageError, match="parts"):
        pipeline.generate(**{**given, "seed": 6})
    remove_spool(folder)
    assert not folder.exists() and again.frames.any()


def test_the_command_goes_on_after_an_end(
    toy: Path,
    clips: Result,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from wancli.console import run
    from wancli.run import wanrun

    picture(90, 70).save(tmp_path / "first.png")
    output = tmp_path / "o.npy"

    def call(*more: object) -> int:
        words = ("--artifact", toy, "-p", "a fox", "--negative-prompt", "", "--steps", 2, "--seed", 5)
        files = ("--image", tmp_path / "first.png", "--output", output, "--clips", CLIPS)
        return run(wanrun, [str(word) for word in (*words, *files, *more)])

    end = Spool.end

    def full(spool: Spool, latents: np.ndarray) -> None:
        if spool.count == CLIPS - 1:
            raise UsageError("full")
        end(spool, latents)

    with monkeypatch.context() as patched:
        patched.setattr(Spool, "end", full)
        assert call() == 2
    assert spool_of(output).is_dir() and not output.exists()
    capsys.readouterr()
    assert call("--fps", 8) == 2
    assert str(spool_of(output)) in one_error(capsys)
    assert call() == 0
    assert not spool_of(output).exists()
    np.testing.assert_array_equal(np.load(output), clips.frames[0])


def test_what_takes_no_first_image_has_no_clips(toy_artifact: Path, refused: Refused) -> None:
    assert "clips" in refused(toy_artifact, "--clips", 2, code=2)


def test_parts_that_are_damaged_are_not_continued(tmp_path: Path) -> None:
    frames = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
    told = list[np.ndarray]()
    memory, spool = Parts(), Spool(tmp_path / "o", "key", (4, 6))
    passing = Spool(tmp_path / "passed", "key", (4, 6), lambda video, some: told.append(some))
    for parts in (memory, spool, passing):
        for own, latents in ((frames, np.ones(1, np.float32)), (frames[1:], np.zeros(1, np.float32))):
            parts(0, own)
            parts.end(latents)
    np.testing.assert_array_equal(memory.joined(PROFILE), spool.joined(PROFILE))
    np.testing.assert_array_equal(memory.last, spool.last)
    assert passing.joined(PROFILE).shape == (1, 0, 64, 96, 3)
    Spool(tmp_path / "passed", "key", (4, 6), lambda video, some: told.append(some)).resume()
    np.testing.assert_array_equal(np.concatenate(told[:2]), told[2])
    spool(0, frames)  # of a part that is not ended
    again = Spool(tmp_path / "o", "key", (4, 6))
    assert again.count == 2 and not again.latents.any()
    again(0, frames[:1])
    again.end(np.zeros(1, np.float32))
    whole = np.concatenate([frames, frames[1:], frames[:1]])
    np.testing.assert_array_equal(Spool(tmp_path / "o", "key", (4, 6)).joined(PROFILE)[0], whole)
    with (tmp_path / "o" / "frames").open("r+b") as file:
        file.write(b"\1")
    with pytest.raises(UsageError):
        Spool(tmp_path / "o", "key", (4, 6))
    assert Spool(tmp_path / "o", "key", (4, 6), overwrite=True).count == 0
    (tmp_path / "passed" / "latents.npy").write_bytes(b"")
    with pytest.raises(UsageError):
        Spool(tmp_path / "passed", "key", (4, 6))
    assert Spool(tmp_path / "passed", "key", (4, 6), overwrite=True).count == 0
    (tmp_path / "file").touch()
    with pytest.raises(UsageError):
        Spool(tmp_path / "file", "key", (4, 6), overwrite=True)


def test_a_part_that_cannot_be_written_leaves_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames, folder = np.zeros((2, 4, 6, 3), np.uint8), tmp_path / "o"
    spool = Spool(folder, "key", (4, 6))
    spool(0, frames)
    spool.end(np.ones(3, np.float32))

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr("wanrun.generation.parts.replace_file", full)
        spool(0, frames)
        with pytest.raises(NoSpaceError):
            spool.end(np.zeros(3, np.float32))
    again = Spool(folder, "key", (4, 6))
    assert again.count == 1 and again.latents.all()
    assert {path.name for path in folder.iterdir()} == {"frames", "latents.npy", "parts.json"}
