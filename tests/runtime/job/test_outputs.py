"""Files of a result: of each kind, also while frames are made; whole, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wanrun
from helpers.options import generation
from wanrun.errors import CancelledError, UsageError
from wanrun.generation.decoding import Frames
from wanrun.job.job import Job, run_job
from wanrun.job.outputs import KINDS, LAST_FRAME, LATENTS, THUMBNAIL, VIDEO, Output, outputs_of
from wanrun.job.writing import AHEAD, Pieces
from wanrun.media.write_video import read_metadata, write_video


@pytest.fixture
def result() -> wanrun.Result:
    frames = np.random.default_rng(0).integers(0, 256, (2, 3, 32, 1280, 3), dtype=np.uint8)
    return wanrun.Result(frames, np.zeros((2, 16, 1, 4, 160), np.float32), {}, wanrun.Timings())


def test_the_names_of_each_video() -> None:
    one = outputs_of(Path("a/v.mp4"), 1, (VIDEO, THUMBNAIL, LAST_FRAME))
    assert [str(output.path) for output in one] == ["a/v.mp4", "a/v.thumbnail.webp", "a/v.last.png"]
    two = outputs_of(Path("v.GIF"), 2)
    assert two == (Output(Path("v-0.GIF"), 0), Output(Path("v-1.GIF"), 1))
    assert outputs_of(Path("v.mp4"), 2, (LATENTS,)) == (Output(Path("v.latents.npy"), 0, LATENTS),)
    with pytest.raises(UsageError):
        outputs_of(Path("v.txt"), 1)


def test_each_kind_is_written(result: wanrun.Result, tmp_path: Path) -> None:
    written = {
        kind: Output(tmp_path / f"{kind}{row.ending or '.npy'}", 1, kind) for kind, row in KINDS.items()
    }
    for output in written.values():
        assert output.write(result, {"fps": 16}, overwrite=False) == output.path.stat().st_size > 0
    assert (np.load(written[VIDEO].path) == result.frames[1]).all()
    assert np.load(written[LATENTS].path).shape == result.latents.shape
    with Image.open(written[THUMBNAIL].path) as small:
        assert (small.format, small.size) == ("WEBP", (640, 16))
    with Image.open(written[LAST_FRAME].path) as last:
        assert (np.asarray(last) == result.frames[1, -1]).all()
    folder = Output(tmp_path / "v.frames")
    nbytes = folder.write(result, {"fps": 16}, overwrite=False)
    assert nbytes == sum(file.stat().st_size for file in folder.path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_written_is_told(result: wanrun.Result, tmp_path: Path, kind: str) -> None:
    output = Output(tmp_path / "gone" / f"x{KINDS[kind].ending or '.npy'}", 0, kind)
    with pytest.raises(UsageError, match=str(output.path)):
        output.write(result, {"fps": 16}, overwrite=True)


# Written while their frames are made.


FRAMES = np.random.default_rng(0).integers(0, 256, (2, 9, 32, 48, 3), dtype=np.uint8)
PIECES = (slice(0, 1), slice(1, 5), slice(5, 9))


class Pipeline:
    """Gives the frames of two videos away piece by piece, and lets something happen before each piece."""

    def __init__(self, happens: Callable[[int], object]) -> None:
        self.happens = happens

    def run(self, generation: Any, *, on_frames: Any, timings: Any, **given: Any) -> wanrun.Result:
        options = generation.metadata(None, {})
        for video, frames in enumerate(FRAMES):
            for number, piece in enumerate(PIECES):
                self.happens(len(PIECES) * video + number)
                on_frames(Frames(frames[piece], piece.start, len(frames), video, options))
        return wanrun.Result(FRAMES[:, :0], np.ones((2, 1), np.float32), options, timings)


def run(path: Path, happens: Callable[[int], object] = lambda piece: None, **given: Any) -> wanrun.Outcome:
    pipeline: Any = Pipeline(happens)
    job = Job("7", generation(seed=3), outputs_of(path, 2, (VIDEO, LAST_FRAME)))
    return run_job(pipeline, job, **given)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".mp4", ".npy", ".gif", ".frames"])
def test_the_files_are_those_of_whole_videos(tmp_path: Path, suffix: str) -> None:
    outcome = run(tmp_path / f"v{suffix}")
    assert outcome.error is None and len(outcome.sizes) == 4
    for video in (0, 1):
        made, whole = tmp_path / f"v-{video}{suffix}", tmp_path / f"whole-{video}{suffix}"
        write_video(FRAMES[video], whole, 16, {**outcome.metadata, "video": video})
        files = [sorted(one.iterdir()) if one.is_dir() else [one] for one in (made, whole)]
        for one, other in zip(*files, strict=True):
            assert one.read_bytes() == other.read_bytes()
        assert read_metadata(made) == {**outcome.metadata, "video": video}
        with Image.open(tmp_path / f"v-{video}.last.png") as last:
            assert (np.asarray(last) == FRAMES[video, -1]).all()
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize("when", [1, 4])
def test_a_job_that_fails_midway_leaves_nothing(tmp_path: Path, when: int) -> None:
    """Not the first video either, of which all frames were there."""

    def cancelled(piece: int) -> None:
        if piece == when:
            raise CancelledError("cancelled", "it was cancelled")

    assert isinstance(run(tmp_path / "v.mp4", cancelled).error, CancelledError)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_ends_the_job(tmp_path: Path) -> None:
    """At the next frames, also where the encoder no longer takes any."""
    seen = list[int]()
    outcome = run(tmp_path / "gone" / "v.npy", seen.append)
    assert isinstance(outcome.error, UsageError) and "gone" in outcome.error.what
    assert outcome.sizes == {}


def test_a_decoder_waits_for_a_slow_encoder() -> None:
    taken, go = list[int](), threading.Event()

    def write(pieces: Any) -> None:
        go.wait(10)
        taken.extend(len(piece) for piece in pieces)

    with ThreadPoolExecutor(2) as threads:
        pieces = Pieces(write, threads)

        def put() -> None:
            for _ in range(AHEAD + 1):
                pieces.put(FRAMES[0, :2])

        putting = threads.submit(put)
        try:
            with pytest.raises(TimeoutError):
                putting.result(0.05)
        finally:
            go.set()
            putting.result(10)
            pieces.finish()
    assert taken == [2] * (AHEAD + 1)
