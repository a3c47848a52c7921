"""Runs the jobs of a worklist with one pipeline: makes, writes, reports, and continues after a failure."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wancli.jobs.existing import check_same
from wancli.jobs.job import Job
from wancli.jobs.outputs import check_folder
from wancli.jobs.worklist import Worklist
from wanrun import in_bytes, replace_file
from wanrun.errors import ArtifactError, WanError, unwritable
from wanrun.media.write_video import files_of, write_video
from wanrun.request.prompts_file import key_of
from wanrun.terminal.lines import print_error, report, warn
from wanrun.terminal.status import Status
from wanrun.undo import say

if TYPE_CHECKING:
    from wanrun import Pipeline, Timings


class Batch:
    """Makes the videos of a run, and counts the made, skipped and failed ones.

    If the prompt of the command line fails, the run ends. If a line of a prompts file fails, the failure is
    reported and the others are made; only an unusable artifact, which concerns all lines, ends the run.

    Args:
        overwrite: whether existing files may be replaced.
        leads: whether this process prints and writes; one of a run of several processes does.
        status: the line that says what is waited for, which gives way to other lines; None for no such line.
    """

    def __init__(
        self,
        work: Worklist,
        overwrite: bool,
        timings: Timings,
        leads: bool = True,
        status: Status | None = None,
    ) -> None:
        self._work, self._overwrite, self._timings = work, overwrite, timings
        self._leads = leads
        self._status = Status(lambda: ()) if status is None else status
        self.outcomes: dict[int, float | WanError] = {}  # by prompt: seconds, or why there are none
        self._failures: list[WanError] = []
        self._where = ""

    @property
    def exit_code(self) -> int:
        """The exit code of the first failure; 0 without a failure."""
        return self._failures[0].exit_code if self._failures else 0

    def warn(self, message: str) -> None:
        """Prints a warning, and which line of the prompts file it concerns."""
        self._print(warn, f"{self._where}{message}")

    def report(self, message: str) -> None:
        """Prints what was done."""
        self._print(report, message)

    def note(self, message: str) -> None:
        """Prints what was decided, to standard error."""
        self._print(print_error, message)

    def _print(self, printing: Callable[[str], None], message: str) -> None:
        if self._leads:
            with self._status.paused():
                printing(message)

    def report_worklist(self) -> None:
        """Prints the lines that cannot be made, and those whose videos exist."""
        for failure in self._work.failures.values():
            self._fail(failure)
        for job in self._work.finished:
            entry, names = job.entry, ", ".join(map(self._work.shown, job.videos))
            self.report(f"[{entry.index}/{entry.total}] {names} is there already")
        jobs = (*self._work.jobs, *self._work.finished)
        for warning in dict.fromkeys(text for job in jobs for text in job.generation.warnings):
            self.warn(warning)

    def _fail(self, error: WanError) -> None:
        """Reports a line that cannot be made, with the options' JSON keys."""
        self._failures.append(error)
        self.note(f"error: {error.spelled(key_of)}")

    def run(self, pipeline: Pipeline) -> None:
        """Makes the videos of all jobs with a pipeline that was loaded with the first job's profile.

        Raises:
            ArtifactError: if the artifact is not usable.
            WanError: if the prompt of the command line fails.
        """
        for job in self._work.jobs:
            self._where, began = f"{job.entry.where}: " if self._work.many else "", time.monotonic()
            try:
                self._make(job, pipeline)
            except WanError as error:
                self.outcomes[job.entry.index] = error.again()
                if isinstance(error, ArtifactError) or not self._work.many:
                    raise
                self._fail(error.located(job.entry.where))
            else:
                self.outcomes[job.entry.index] = time.monotonic() - began
        self._where = ""

    def report_count(self) -> None:
        """Prints the numbers of made, skipped, failed and untried lines, also if the run ended early."""
        if self._work.many:
            self.report(self._count())

    def say_count(self) -> None:
        """Does so when a signal ends the process, without the locks of Python's streams."""
        if self._work.many and self._leads:
            say(f"{self._count()}\n")

    def _count(self) -> str:
        skipped, failed = len(self._work.finished), len(self._failures)
        made = [type(outcome) for outcome in list(self.outcomes.values())].count(float)
        left = len(self._work.jobs) - made - (failed - len(self._work.failures))
        rest = f", {left} not tried" if left else ""
        return f"{made} made, {skipped} skipped, {failed} failed{rest}"

    def _make(self, job: Job, pipeline: Pipeline) -> None:
        work, entry, started = self._work, job.entry, time.monotonic()
        for path in job.videos[: int(self._leads)]:  # the folder may be gone since the start, hours ago
            check_folder(path.parent)
        place = f"[{entry.index}/{entry.total}] " if work.many else ""
        inputs, self._status.place = work.media.inputs(job.generation), place
        try:
            result = pipeline.run(
                job.generation, inputs=inputs, latents=work.noise, timings=self._timings, warn=self.warn
            )
        finally:
            self._status.place = ""
        if not self._leads:
            return
        sizes = dict[int, int]()
        with self._timings.phase("encode_video"):
            for index in job.missing:
                video, facts = job.videos[index], {**job.metadata, "video": index}
                write_video(result.frames[index], video, job.generation.fps, facts, self._overwrite)
                sizes[index] = sum(file.stat().st_size for file in files_of(video))
                if work.store is not None:
                    check = partial(check_same, work.shown(video))
                    work.store.deliver(video, facts, self._overwrite, check)
        if job.latents is not None:
            _write_latents(job.latents, result.latents)
        seconds, start = time.monotonic() - started, f"seed {job.generation.options['seed']}"
        if work.noise is not None:
            start = f"latents {job.metadata['latents']}"
        _, num_frames, height, width, _ = result.frames.shape
        for index, size in sizes.items():
            how = f"{start}, {num_frames} frames of {width}x{height}, {in_bytes(size)}, {seconds:.1f} s"
            self.report(f"{place}wrote {work.shown(job.videos[index])} ({how})")


def _write_latents(path: Path, latents: np.ndarray) -> None:
    """Writes the latents atomically, under exactly this name."""
    buffer = io.BytesIO()
    np.save(buffer, latents)
    try:
        replace_file(path, buffer.getvalue())
    except OSError as error:
        raise unwritable(f"the latents {path}", error, "choose another --save-latents") from error
