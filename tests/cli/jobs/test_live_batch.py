"""A live video of a run: its chunks go to a file or to standard output as they are made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.fake_pipeline import SIZE, Fake, run_here
from helpers.manifests import with_model
from helpers.options import run_options
from wancli.jobs import live_batch
from wancli.jobs.live_batch import LiveBatch, asked_live
from wancli.jobs.worklist import Worklist
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.model import Chunking
from wanrun.errors import UsageError, WanError
from wanrun.generation import load
from wanrun.media.write_video import read_metadata
from wanrun.request.resolve import resolve
from wanrun.terminal.status import Status
from wanrun.timing.timings import Timings


class Live(Fake):
    """Makes four chunks of two frames, and says what had been written before each."""

    def __init__(self, seen: Callable[[], int], error: WanError | None = None) -> None:
        super().__init__(num_videos=1)
        self._seen, self._error = seen, error
        self.before: list[int] = []
        self.most: int | None = 0

    @contextmanager
    def run_live(
        self, generation: Any, *, max_frames: int | None, latents: Any, cancel: object
    ) -> Iterator[Iterator[Any]]:
        self.most, self.given = max_frames, latents
        with closing(self._made()) as chunks:
            yield chunks
        self.asked.append("ended")

    def _made(self) -> Iterator[Any]:
        for number in range(4):
            self.before.append(self._seen())
            latents = np.full((1, 2, 1, 3, 4), number, np.float32)
            yield SimpleNamespace(frames=np.full((1, 2, *SIZE[1:]), number, np.uint8), latents=latents)
        if self._error is not None:
            raise self._error


def fragments(path: Path) -> int:
    return path.read_bytes().count(b"moof") if path.exists() else 0


@pytest.fixture
def chunked(artifact: Path) -> Path:
    """An artifact of a model that makes a video chunk by chunk, as its manifest says."""
    with_model(read_manifest(artifact), chunks=Chunking(first=1, each=2)).write(artifact)
    return artifact


@pytest.fixture
def batch_of(chunked: Path, worklist_of: Callable[..., Worklist]) -> Callable[..., LiveBatch]:
    """Plans a live video, from keywords of ``RunOptions``."""

    def make(**run: Any) -> LiveBatch:
        work = worklist_of(prompt="a fox", live=True, **run)
        return LiveBatch(work, run_options(live=True, **run), Timings(), Status(lambda: ()))

    return make


BatchOf = Callable[..., LiveBatch]


def test_a_file_grows_while_later_chunks_are_made(
    chunked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "o.mp4"
    pipeline = Live(lambda: fragments(path))
    monkeypatch.setattr(load, "load", pipeline.load)
    how = ("--live", "--prompt", "a fox", "--seed", 5, "--steps", 2, "--output", path)
    done = run_here(capsys, chunked, *how)
    assert (done.code, done.err, pipeline.most) == (0, [], None)
    assert pipeline.asked == ["ended", "closed"] and fragments(path) == 4
    assert all(there >= number - 1 for number, there in enumerate(pipeline.before))
    metadata = read_metadata(path)
    assert metadata["seed"] == 5 and "num_frames" not in metadata
    assert done.out[0].startswith(f"wrote {path} (seed 5, 8 frames of 96x64, ")
    assert run_here(capsys, chunked, *how, "--overwrite", "--frames", 6).code == 2
    assert "--live" in run_here(capsys, chunked, "--prompt", "a fox", "--output", "-").err[0]
    assert fragments(path) == 4


def test_what_a_signal_ends_is_told(
    batch_of: BatchOf, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    batch = batch_of(output=tmp_path / "o.mp4")
    batch.say_count()
    assert capfd.readouterr().out == ""
    batch.run(Live(lambda: 0))  # type: ignore[arg-type]
    assert batch.outcomes[1].metadata["num_frames"] == 8
    batch.say_count()
    first, last = capfd.readouterr().out.splitlines()
    assert first.partition(" s, ")[0].startswith(last[:40])


def test_an_error_leaves_what_was_made(
    batch_of: BatchOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WanError, match="finite"):
        batch = batch_of(output=tmp_path / "o.mp4", save_latents=tmp_path / "z.npy")
        batch.run(Live(lambda: 0, WanError("not_finite", "not finite")))  # type: ignore[arg-type]
    assert fragments(tmp_path / "o.mp4") == 4
    assert np.load(tmp_path / "z.npy")[0, 0, :, 0, 0].tolist() == [0, 1, 2, 3]
    assert "(seed " in capsys.readouterr().err


def test_given_latents_are_of_whole_chunks(batch_of: BatchOf, chunked: Path, tmp_path: Path) -> None:
    batch, channels, _, *cells = resolve(chunked, "a fox").latents_shape
    kinds = [(5, None, True), (2, 5, True), (2, None, False), (3, 5, False)]
    for frames, total, fits in kinds:
        given = np.zeros((batch, channels, frames, *cells), np.float32)
        np.save(tmp_path / "z.npy", given)
        made: dict[str, Any] = {"latents": tmp_path / "z.npy", "output": tmp_path / "o.mp4", "frames": total}
        if not fits:
            with pytest.raises(UsageError, match="chunk"):
                batch_of(**made)
            continue
        pipeline = Live(lambda: 0)
        batch_of(**made, overwrite=True).run(pipeline)  # type: ignore[arg-type]
        assert np.array_equal(pipeline.given, given)
        assert read_metadata(tmp_path / "o.mp4")["seed"] is not None


def test_a_reader_of_standard_output(batch_of: BatchOf, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(live_batch, "stdout_for_video", lambda: writing)
    batch, pipeline = batch_of(output="-", seconds=0.5), Live(lambda: 0)
    batch.run(pipeline)  # type: ignore[arg-type]
    assert pipeline.most == 9
    assert os.read(reading, 2**16).count(b"moof") == 4
    os.close(reading)
    pipeline = Live(lambda: 0)
    with pytest.raises(BrokenPipeError):
        batch.run(pipeline)  # type: ignore[arg-type]
    os.close(writing)
    assert pipeline.before == [0, 0]


@pytest.mark.parametrize(
    ("run", "given", "named"),
    [
        ({"seconds": 3.0}, {}, {"seconds"}),
        ({"live": True, "seconds": 3.0}, {"num_frames": 5}, {"seconds", "num_frames"}),
        ({"live": True, "seeds": (1, 2)}, {}, {"live", "seeds"}),
        ({"live": True, "distributed": True}, {}, {"live", "distributed"}),
        ({"live": True}, {"clips": 2}, {"live", "clips"}),
        ({"live": True, "output": "s3://bucket/o.mp4"}, {}, set()),
        ({"live": True, "output": "o.webm"}, {}, set()),
    ],
)
def test_what_no_live_video_has(run: dict[str, Any], given: dict[str, Any], named: set[str]) -> None:
    with pytest.raises(UsageError) as caught:
        asked_live(run_options(**run), given)
    assert set(caught.value.fields) == named


def test_the_length_is_no_profiles() -> None:
    run, given = asked_live(run_options(live=True, output="-"), {"num_frames": 400, "seed": 1})
    assert (run.frames, given) == (400, {"seed": 1})
