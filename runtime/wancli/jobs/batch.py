"""Runs the jobs of a worklist with one pipeline: makes, writes, reports, and continues after a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from wancli.error_line import error_line
from wancli.jobs.existing import check_same
from wancli.jobs.hours import Hours
from wancli.jobs.output_names import check_folder
from wancli.jobs.planned import Planned
from wancli.jobs.worklist import Worklist
from wanrun import CancelToken, Event, Job, Outcome, Output, Progress, Timings, in_bytes, run_job
from wanrun.errors import AdapterError, ArtifactError, WanError
from wanrun.job.line import Passed, in_line
from wanrun.job.outputs import VIDEO
from wanrun.job.previews import Previews
from wanrun.request.prompts_file import key_of
from wanrun.terminal.lines import print_error, report, warn
from wanrun.terminal.pictures import Pictures
from wanrun.terminal.status import Status
from wanrun.undo import say

if TYPE_CHECKING:
    import numpy as np

    from wanrun import Pipeline, Step


class Batch:
    """Makes the videos of a run, and counts the made, skipped and failed ones.

    If the prompt of the command line fails, the run ends. If a line of a prompts file fails, the failure is
    reported and the others are made; only an unusable artifact, which concerns all lines, ends the run. Only
    the process that ``leads`` a run of several prints and writes. If ``ahead``, the next prompt is prepared
    while a video is decoded and written; processes of one run make everything in one order, without it.
    """

    def __init__(
        self,
        work: Worklist,
        overwrite: bool,
        timings: Timings,
        leads: bool = True,
        status: Status | None = None,
        ahead: bool = True,
        pictures: Pictures | None = None,
        hours: Hours | None = None,
        as_json: bool = False,
    ) -> None:
        self._work, self._overwrite, self._timings = work, overwrite, timings
        self._leads, self._ahead, self._pictures, self._hours = leads, ahead, pictures, hours
        self._as_json = as_json
        self._status = Status(lambda: ()) if status is None else status
        self.outcomes: dict[int, Outcome] = {}  # by the number of the prompt
        self._failures: list[WanError] = []
        self._running: dict[str, CancelToken] = {}  # by the id of a job

    @property
    def exit_code(self) -> int:
        """The exit code of the first failure; 0 without a failure."""
        return self._failures[0].exit_code if self._failures else 0

    def warn(self, message: str, planned: Planned | None = None) -> None:
        """Prints a warning, and the line of the prompts file that it concerns."""
        where = f"{planned.entry.where}: " if planned is not None and self._work.many else ""
        self._print(warn, f"{where}{message}")

    def report(self, message: str) -> None:
        """Prints a line about finished work."""
        self._print(report, message)

    def note(self, message: str) -> None:
        """Prints a line about a decision, to standard error."""
        self._print(print_error, message)

    def _print(self, printing: Callable[[str], None], message: str) -> None:
        if self._leads:
            with self._status.paused():
                self._clear_pictures()
                printing(message)

    def _clear_pictures(self) -> None:
        if self._pictures is not None:
            with self._status.held():
                self._pictures.clear()

    def report_worklist(self) -> None:
        """Prints the lines that cannot be made, and those whose videos exist."""
        for failure in self._work.failures.values():
            self._fail(failure)
        for planned in self._work.finished:
            names = ", ".join(map(self._work.shown, planned.videos))
            self.report(f"[{planned.job.id}] {names} is there already")
        for planned in self._work.jobs:
            if planned.parts:
                place = f"[{planned.job.id}] " if self._work.many else ""
                self.note(f"{place}goes on with {_begun(planned)}")
        every = (*self._work.jobs, *self._work.finished)
        for warning in dict.fromkeys(text for one in every for text in one.job.generation.warnings):
            self.warn(warning)

    def _fail(self, error: WanError) -> None:
        """Reports a line that cannot be made, with the options' JSON keys."""
        self._failures.append(error)
        self.note(error_line(error, key_of, self._as_json))

    def run(self, pipeline: Pipeline) -> None:
        """Makes the videos of all jobs with a pipeline that was loaded with the first job's profile.

        Raises ArtifactError if the artifact is not usable, and WanError if the prompt of the command line
        fails.
        """
        jobs = [partial(self._make, planned, pipeline) for planned in self._work.jobs]
        try:
            for planned, outcome in zip(self._work.jobs, in_line(jobs), strict=True):
                self._settle(planned, outcome)
        finally:
            self._clear_pictures()

    def _settle(self, planned: Planned, outcome: Outcome) -> None:
        """Records how a job ended; raises an error that ends the run."""
        if (error := outcome.error) is None:
            self.outcomes[planned.entry.index] = outcome
            return
        self.outcomes[planned.entry.index] = structs.replace(outcome, error=error.again())
        unusable = isinstance(error, ArtifactError) and not isinstance(error, AdapterError)
        if unusable or not self._work.many:
            for token in list(self._running.values()):
                token.cancel()
            raise error
        self._fail(error.located(planned.entry.where))

    def report_count(self) -> None:
        """Prints the numbers of made, skipped, failed and untried lines, also if the run ended early."""
        if self._work.many:
            self.report(self._count())

    def say_count(self) -> None:
        """Signal-safe ``report_count``: writes without taking the locks of Python's streams."""
        if self._work.many and self._leads:
            say(f"{self._count()}\n")

    def _count(self) -> str:
        skipped, failed = len(self._work.finished), len(self._failures)
        made = [outcome.error for outcome in list(self.outcomes.values())].count(None)
        left = len(self._work.jobs) - made - (failed - len(self._work.failures))
        rest = f", {left} not tried" if left else ""
        return f"{made} made, {skipped} skipped, {failed} failed{rest}"

    def _make(self, planned: Planned, pipeline: Pipeline, passed: Passed) -> Outcome:
        """Makes the videos of a prompt, and reports those that this process has written."""
        work, job = self._work, planned.job
        if not self._leads:
            job = replace(job, outputs=())
        timings = Timings.from_now(self._timings)
        progress = Progress(job.id, self._telling(planned, timings), timings)
        more: dict[str, Any] = {"passed": passed, "spool": planned.spool} if self._ahead else {}
        try:
            with self._shown_running(job) as token:
                for output in job.outputs[:1]:  # the folder may be gone since the start, hours ago
                    check_folder(output.path.parent)
                outcome = run_job(
                    pipeline,
                    job,
                    progress,
                    inputs=work.media.inputs(job.generation),
                    latents=work.noise,
                    facts=planned.metadata,
                    cancel=token,
                    warn=partial(self.warn, planned=planned),
                    overwrite=self._overwrite,
                    last=planned is work.jobs[-1],
                    written=self._deliver,
                    look=None if self._pictures is None else self._look(self._pictures),
                    **more,
                )
        except WanError as error:
            return progress.outcome(error)
        if outcome.error is None:
            self._report_videos(job, outcome)
            if self._hours is not None:
                self._hours.learn(job.id, outcome)
        return outcome

    def _look(self, pictures: Pictures) -> Callable[[int, Step], None]:
        """Returns a listener that shows pictures of a job's steps on the terminal, now and then."""

        def show(done: int, frames: np.ndarray) -> None:
            with self._status.held():
                pictures.show(frames)

        previews = Previews(show)

        def look(done: int, step: Step) -> None:
            previews.look()
            previews.step(done, step)

        return look

    def _telling(self, planned: Planned, timings: Timings) -> Callable[[Event], object] | None:
        """Returns a listener to the first job's steps, which says how long the rest takes."""
        if self._hours is None or planned is not self._work.jobs[0]:
            return None
        return partial(self._hours.step, timings=timings, note=self.note)

    @contextmanager
    def _shown_running(self, job: Job) -> Iterator[CancelToken]:
        """Shows the number of a job of many while it runs; yields the token that cancels it."""
        token = self._running[job.id] = CancelToken()
        try:
            self._show_places()
            yield token
        finally:
            del self._running[job.id]
            self._show_places()

    def _show_places(self) -> None:
        self._status.place = "".join(f"[{id}] " for id in list(self._running)) if self._work.many else ""

    def _deliver(self, output: Output, metadata: Mapping[str, Any]) -> None:
        """Uploads a finished video to the object store, if there is one."""
        if self._work.store is not None and output.kind == VIDEO:
            facts = {**metadata, "video": output.video}
            check = partial(check_same, self._work.shown(output.path))
            self._work.store.deliver(output.path, facts, self._overwrite, check)

    def _report_videos(self, job: Job, outcome: Outcome) -> None:
        """Prints which videos were written."""
        facts, place = outcome.metadata, f"[{job.id}] " if self._work.many else ""
        start = f"seed {facts['seed']}" if self._work.noise is None else f"latents {facts['latents']}"
        shape = f"{facts['num_frames']} frames of {facts['width']}x{facts['height']}"
        for output in job.outputs:
            if output.kind == VIDEO:
                size = in_bytes(outcome.sizes[str(output.path)])
                how = f"{start}, {shape}, {size}, {outcome.elapsed:.1f} s"
                self.report(f"{place}wrote {self._work.shown(output.path)} ({how})")


def _begun(planned: Planned) -> str:
    """Returns a line about what an ended run has left of a prompt's video."""
    generation = planned.job.generation
    clips = f"{planned.parts} of {generation.clips} clips"
    there = clips if generation.blending is None else "latents of all steps"
    return f"the {there} in {planned.spool} (seed {generation.options['seed']})"
