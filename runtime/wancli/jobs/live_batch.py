"""A live video of a run: each chunk is written, to a file or standard output, while the next one is made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from wancli.jobs.batch import Batch
from wancli.jobs.output_names import check_encoder
from wancli.jobs.planned import Planned
from wancli.jobs.run_options import STDOUT, RunOptions
from wancli.jobs.worklist import Worklist
from wancli.streams import stdout_for_video
from wanrun import Outcome, Progress, Result, Timings, in_bytes
from wanrun.errors import UsageError, WanError, field
from wanrun.job.line import Passed
from wanrun.job.outputs import LATENTS
from wanrun.media.live_video import LiveVideo, Sink, live_file, live_video, one_behind, write_all
from wanrun.request.values import OF_WHOLE_VIDEOS
from wanrun.terminal.status import Status
from wanrun.undo import say, undone_at_exit

if TYPE_CHECKING:
    from wanrun import Chunk, Job, Output, Pipeline

_OF_RUNS = ("prompts", "seeds", "report", "coordinator")


def asked_live(run: RunOptions, given: Mapping[str, Any]) -> tuple[RunOptions, dict[str, Any]]:
    """Returns the options of a live video's run and of its generation, whose profile has no length.

    Raises UsageError for an option that a live video lacks, and for an output that is not .mp4.
    """
    if not run.live:
        raise UsageError(
            "no_effect",
            f"{field('seconds')} is the length of a live video",
            remedy="pass --live, or --frames",
        )
    others = [name for name in _OF_RUNS if getattr(run, name) is not None]
    others += [name for name in OF_WHOLE_VIDEOS if name in given] + ["distributed"] * run.distributed
    if others:
        raise _excluded("live", others[0])
    if run.seconds is not None and "num_frames" in given:
        raise _excluded("seconds", "num_frames")
    output = run.output or "out.mp4"
    if output != STDOUT and ("://" in output or Path(output).suffix.lower() != ".mp4"):
        raise UsageError(
            "unsupported",
            "a live video is an .mp4 in a folder, or goes to standard output",
            found=output,
            remedy="choose --output NAME.mp4, or --output -",
        )
    if output == STDOUT:
        check_encoder([Path("live.mp4")])
    rest = {name: value for name, value in given.items() if name != "num_frames"}
    return structs.replace(run, frames=given.get("num_frames")), rest


def _excluded(one: str, other: str) -> UsageError:
    return UsageError(
        "conflict", f"{field(one)} and {field(other)} exclude each other", remedy="leave one of them out"
    )


@dataclass
class _Written:
    """What was written of a live video: chunks with so many ``frames`` and ``nbytes``.

    ``begin`` is how a line about it begins, ``size`` its width and height. ``now`` returns the seconds since
    its beginning, ``first`` those until the first chunk was written. ``latents`` are kept if they are to be
    saved.
    """

    begin: str
    size: tuple[int, int]
    now: Callable[[], float]
    frames: int = 0
    nbytes: int = 0
    first: float = 0.0
    latents: list[np.ndarray] | None = None

    def add(self, chunk: Chunk) -> None:
        self.first, self.frames = self.first or self.now(), self.frames + chunk.frames.shape[1]
        if self.latents is not None:
            self.latents.append(chunk.latents)

    def save(self, output: Output) -> None:
        """Writes the latents of all chunks; none before the first one."""
        if self.latents:
            made = Result(np.empty(0), np.concatenate(self.latents, 2), {}, Timings())
            output.write(made, {}, overwrite=True)

    def __str__(self) -> str:
        shape = f"{self.frames} frames of {self.size[0]}x{self.size[1]}, {in_bytes(self.nbytes)}"
        return f"{self.begin}, {shape}, {self.now():.1f} s, the first frames after {self.first:.2f} s)"


class LiveBatch(Batch):
    """Makes the live video of a run.

    The constructor raises UsageError if the video goes to standard output, and that is a terminal.
    """

    def __init__(self, work: Worklist, run: RunOptions, timings: Timings, status: Status) -> None:
        super().__init__(work, run.overwrite, timings, status=status, as_json=run.json_errors)
        self._run, self._stdout = run, stdout_for_video() if run.to_stdout else None
        self._written: _Written | None = None

    def say_count(self) -> None:
        """Prints how much was made when a signal ends the process, as it ends a video without end."""
        if self._written is not None and self._written.frames:
            say(f"{self._written}\n")

    def _make(self, planned: Planned, pipeline: Pipeline, passed: Passed) -> Outcome:
        """Makes the video, and reports it."""
        generation, total = planned.job.generation, self._run.length(planned.job.generation)
        metadata = {name: value for name, value in planned.metadata.items() if name != "num_frames"}
        metadata["seed"] = generation.options["seed"]  # of later chunks than those of given latents
        progress = Progress(planned.job.id, timings=Timings.from_now(self._timings))
        written = self._written = self._begun(planned, progress.timings)
        told = None if total is None else lambda: (written.frames, total)
        try:
            with (
                _saved(planned.job, written),
                self._shown_running(planned.job) as token,
                progress.timings.phase("live", None, told, "frame"),
                self._sink(planned.videos[0]) as sink,
                live_video(sink, written.size, generation.fps, metadata) as video,
                one_behind(partial(_write, video, written)) as write,
                pipeline.run_live(
                    generation, max_frames=total, latents=self._work.noise, cancel=token
                ) as chunks,
            ):
                for chunk in chunks:
                    write(chunk)
        except WanError as error:
            if written.frames:
                self.note(str(written))
            return progress.outcome(error)
        finally:
            progress.stop()
        self.report(str(written))
        facts = {**metadata, "num_frames": written.frames}
        return progress.outcome(metadata=facts, sizes={str(planned.videos[0]): written.nbytes})

    def _begun(self, planned: Planned, timings: Timings) -> _Written:
        profile, begin = planned.job.generation.profile, timings.now()
        where = planned.videos[0] if self._stdout is None else "standard output"
        seed = planned.job.generation.options["seed"]
        size = profile.width, profile.height
        return _Written(f"wrote {where} (seed {seed}", size, lambda: timings.now() - begin)

    @contextlib.contextmanager
    def _sink(self, path: Path) -> Iterator[Sink]:
        """Yields a function that takes the video's bytes, and counts them."""
        written = self._written
        assert written is not None
        with contextlib.ExitStack() as opened:
            if self._stdout is not None:
                sink: Sink = partial(write_all, self._stdout)
            else:
                sink = opened.enter_context(live_file(path, self._overwrite))

            def take(data: bytes) -> None:
                sink(data)
                written.nbytes += len(data)

            yield take


def _write(video: LiveVideo, written: _Written, chunk: Chunk) -> None:
    """Writes a chunk's frames, and counts them."""
    video.write(chunk.frames[0])
    written.add(chunk)


@contextlib.contextmanager
def _saved(job: Job, written: _Written) -> Iterator[None]:
    """Saves the latents of what was written, if they have a file, once the context or the process ends."""
    output = next((one for one in job.outputs if one.kind == LATENTS), None)
    if output is None:
        yield
        return
    written.latents, save = [], partial(written.save, output)
    with undone_at_exit(save):
        try:
            yield
        except BaseException:
            with contextlib.suppress(WanError):  # the first error is raised
                save()
            raise
        save()
