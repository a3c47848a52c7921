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
from helpers.refusals import refuses
from wanrun.artifact.manifest import read_manifest
from wanrun.denoising.noise import clip_seed
from wanrun.errors import NoSpaceError, UsageError
from wanrun.generation.load import load
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.result import Result
from wanrun.generation.video_parts import Spool, VideoParts, remove_spool, seed_in, spool_of
from wanrun.media.inputs import Media
from wanrun.media.prepare import load_media

Toys = Callable[[str], tuple[Path, Path]]
LENGTH, CLIPS = 9, 3
FRAMES = np.arange(1, 1 + 2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
OPTIONS: dict[str, Any] = {"prompt": "a fox", "negative_prompt": "", "num_steps": 2, "seed": 5}
SEVERAL = {**OPTIONS, "clips": CLIPS, "clip_prompts": "a cat\n"}


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
    return pipeline.generate(**SEVERAL, media=Media(image=picture(90, 70)))


@pytest.mark.thorough
def test_a_clip_is_made_of_the_last_frame_with_the_first_image_as_anchor(
    toy: Path, pipeline: Pipeline, clips: Result, tmp_path: Path
) -> None:
    inputs = load_media(read_manifest(toy), pipeline.profile, Media(image=picture(90, 70)))
    alone = [pipeline.generate(**OPTIONS, inputs=inputs, spool=tmp_path / "unused").frames[0]]
    for clip in range(1, CLIPS):
        chained = replace(inputs, arrays={**inputs.arrays, "image": alone[-1][-1:]})
        options = {**OPTIONS, "prompt": "a cat", "seed": clip_seed(OPTIONS["seed"], clip)}
        alone.append(pipeline.generate(**options, inputs=chained).frames[0])
    joined = np.concatenate([alone[0], *(frames[1:] for frames in alone[1:])])
    np.testing.assert_array_equal(clips.frames[0], joined)
    facts = clips.options
    assert (facts["num_frames"], facts["clip_frames"]) == (CLIPS * (LENGTH - 1) + 1, LENGTH)
    assert not (tmp_path / "unused").exists()  # a video that is made at once has no parts
    assert facts["clip_seeds"] == [clip_seed(OPTIONS["seed"], clip) for clip in range(CLIPS)]


@pytest.mark.thorough
def test_what_an_ended_run_has_made_is_not_made_again(
    pipeline: Pipeline, clips: Result, tmp_path: Path
) -> None:
    folder, steps = tmp_path / "spool", OPTIONS["num_steps"]
    given: dict[str, Any] = {**SEVERAL, "media": Media(image=picture(90, 70)), "spool": folder}

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
    with refuses("unsupported", what=folder):
        pipeline.generate(**{**given, "seed": 6})
    remove_spool(folder)
    assert not folder.exists() and again.frames.any()


@pytest.mark.thorough
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

    def call(*more: object, seed: object = "random") -> int:
        words = ("--artifact", toy, "-p", "a fox", "--negative-prompt", "", "--steps", 2, "--seed", seed)
        files = ("--image", tmp_path / "first.png", "--output", output, "--clips", CLIPS)
        more = ("--clip-prompts", SEVERAL["clip_prompts"], *more)
        return run(wanrun, [str(word) for word in (*words, *files, *more)])

    end = Spool.end

    def full(spool: Spool, latents: np.ndarray) -> None:
        if spool.count == CLIPS - 1:
            raise UsageError("invalid_value", "full")
        end(spool, latents)

    with monkeypatch.context() as patched:
        patched.setattr(Spool, "end", full)
        assert call(seed=5) == 2
    assert spool_of(output).is_dir() and not output.exists()
    capsys.readouterr()
    assert call("--fps", 8) == 2
    assert str(spool_of(output)) in one_error(capsys)
    assert call() == 0  # a seed that would be drawn is that of the parts
    assert f"2 of {CLIPS} clips" in (told := capsys.readouterr().err) and "seed 5" in told
    assert not spool_of(output).exists()
    np.testing.assert_array_equal(np.load(output), clips.frames[0])


def test_what_takes_no_first_image_has_no_clips(toy_artifact: Path, refused: Refused) -> None:
    assert "clips" in refused(toy_artifact, "--clips", 2, code=2)


def written(folder: Path, *counts: int, **given: Any) -> Spool:
    """Makes parts of so many frames, whose latents are their numbers."""
    with Spool(folder, "key", (4, 6), **given) as spool:
        for count in counts:
            spool(0, FRAMES[:count])
            spool.end(np.full(1, spool.count, np.float32))
    return spool


def test_parts_that_are_damaged_are_not_continued(tmp_path: Path) -> None:
    told, memory = list[np.ndarray](), VideoParts()
    for count in (2, 1):
        memory(0, FRAMES[:count])
        memory.end(np.zeros(1, np.float32))
    spool = written(tmp_path / "o", 2, 1)
    np.testing.assert_array_equal(memory.joined(PROFILE), spool.joined(PROFILE))
    np.testing.assert_array_equal(memory.last, spool.last)
    passing = written(tmp_path / "passed", 2, 1, take=lambda video, some: told.append(some))
    assert passing.joined(PROFILE).shape == (1, 0, 64, 96, 3)
    with Spool(tmp_path / "passed", "key", (4, 6), lambda video, some: told.append(some)) as passing:
        passing.resume()
        np.testing.assert_array_equal(np.concatenate(told[:2]), told[2])
    with Spool(tmp_path / "o", "key", (4, 6)) as spool:
        spool(0, FRAMES)  # of a part that is not ended
    with Spool(tmp_path / "o", "key", (4, 6)) as again:
        assert again.count == 2 and again.latents == 1
        again(0, FRAMES[:1])
        again.end(np.zeros(1, np.float32))
    whole = np.concatenate([FRAMES, FRAMES[:1], FRAMES[:1]])
    with Spool(tmp_path / "o", "key", (4, 6)) as spool:
        np.testing.assert_array_equal(mapped := spool.joined(PROFILE)[0], whole)
    with (tmp_path / "o" / "frames").open("r+b") as file:
        file.write(b"\xff")
    (tmp_path / "passed" / "latents.npy").write_bytes(b"")
    for name in ("o", "passed"):
        with refuses("unsupported", what=tmp_path / name, found="damaged"):
            Spool(tmp_path / name, "key", (4, 6)).there()
    assert Spool(tmp_path / "o", "key", (4, 6), overwrite=True).there() == 0
    (tmp_path / "passed" / "latents.npy").unlink()  # as where their removal was ended
    assert written(tmp_path / "passed", 2).count == 1
    anew = written(tmp_path / "o", 2, overwrite=True)
    assert anew.num_frames == 2 and len(mapped) == 4 and mapped[-1].any()  # still there for who has them


@pytest.mark.parametrize("name", ["frames", "latents.npy", "parts.json", ""])
def test_files_of_others_are_neither_read_nor_lost(tmp_path: Path, name: str) -> None:
    folder, mine = tmp_path / "o.mp4.parts", tmp_path / "o.mp4.parts" / (name or "notes.txt")
    folder.mkdir()
    mine.write_text('{"of": "a user"}')
    spool = Spool(folder, "key", (4, 6), overwrite=True)
    if name:
        for use in (spool.there, spool.__enter__):
            with pytest.raises(UsageError, match=name):
                use()
    else:
        written(folder, 1)
        assert spool.there() == 1
    remove_spool(folder)
    assert mine.read_text() == '{"of": "a user"}' and list(folder.iterdir()) == [mine]
    with pytest.raises(UsageError):
        Spool(mine, "key", (4, 6), overwrite=True).there()


def test_one_run_at_a_time_has_the_parts(tmp_path: Path) -> None:
    folder = tmp_path / "o"
    with Spool(folder, "key", (4, 6), seed=5) as spool:
        assert seed_in(folder) == 5
        for use in (Spool(folder, "key", (4, 6)).there, Spool(folder, "key", (4, 6)).__enter__):
            with refuses("busy", what=folder):
                use()
        remove_spool(folder)
        spool(0, FRAMES)
        spool.end(np.ones(1, np.float32))
    assert Spool(folder, "key", (4, 6)).there() == 1
    remove_spool(folder)
    with Spool(folder, "key", (4, 6)):  # without a part
        pass
    assert not folder.exists()


def test_a_part_that_cannot_be_written_leaves_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "o"
    written(folder, 2)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched, Spool(folder, "key", (4, 6)) as spool:
        patched.setattr("wanrun.generation.video_parts.replace_file", full)
        spool(0, FRAMES)
        with pytest.raises(NoSpaceError):
            spool.end(np.zeros(1, np.float32))
    assert written(folder, 1).count == 2
    assert {path.name for path in folder.iterdir()} == {"frames", "latents.npy", "parts.json"}
