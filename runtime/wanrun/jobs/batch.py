"""Runs the jobs of a plan through one pipeline: makes, writes, reports, and goes on after a failure."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from wanrun.console import Progress
from wanrun.errors import ArtifactError, UsageError, WanError
from wanrun.files import replace_file
from wanrun.generation.options import EXPERT_OPTIONS, TASK_OPTIONS
from wanrun.jobs.job import Job
from wanrun.jobs.outputs import check_folder
from wanrun.jobs.preflight import Plan
from wanrun.media.write_video import write_video

if TYPE_CHECKING:
    from wanrun.generation.pipeline import Pipeline


_GENERATION = (
    "seed",
    "num_steps",
    "guidance_scale",
    *EXPERT_OPTIONS,
    "flow_shift",
    "solver",
    "loop",
    *TASK_OPTIONS,
)
"""A job's options that ``Pipeline.generate`` takes by keyword."""


class Batch:
    """What a run makes, and its count of what was made, was there, and failed.

    A prompt of the command line that fails ends the run. A line of a prompts file that fails is reported, and
    the others are made; only what concerns all of them, an artifact that is not usable, ends the run.

    Args:
        plan: what there is to do.
        overwrite: whether files that exist may be replaced.
    """

    def __init__(self, plan: Plan, overwrite: bool) -> None:
        self._plan, self._overwrite = plan, overwrite
        self._made = 0
        self._failures: list[WanError] = []
        self._where = ""

    @property
    def exit_code(self) -> int:
        """That of the first failure; 0 without one."""
        return self._failures[0].exit_code if self._failures else 0

    def warn(self, message: str) -> None:
        """Prints a warning, and which line of the prompts file it concerns."""
        click.echo(f"warning: {self._where}{message}", err=True)

    def report_plan(self) -> None:
        """Prints which lines cannot be made, and which need not be."""
        for failure in self._plan.failures:
            self._fail(failure)
        for job in self._plan.finished:
            names = ", ".join(map(str, job.videos))
            click.echo(f"[{job.request.index}/{job.request.total}] {names} is there already")

    def _fail(self, error: WanError) -> None:
        self._failures.append(error)
        click.echo(f"error: {error}", err=True)

    def run(self, pipeline: Pipeline) -> None:
        """Makes what there is to make.

        Args:
            pipeline: loaded with the plan's profile.

        Raises:
            ArtifactError: whatever comes of the artifact.
            WanError: if the prompt of the command line fails.
        """
        for job in self._plan.jobs:
            self._where = f"{job.request.where}: " if self._plan.many else ""
            try:
                self._make(job, pipeline)
            except ArtifactError:
                raise
            except WanError as error:
                if not self._plan.many:
                    raise
                self._fail(error.located(job.request.where))
            else:
                self._made += 1
        self._where = ""

    def report_count(self) -> None:
        """Prints how many were made, were there, and failed; also of a run that was ended."""
        if self._plan.many:
            skipped, failed = len(self._plan.finished), len(self._failures)
            left = len(self._plan.jobs) - self._made - (failed - len(self._plan.failures))
            rest = f", {left} not tried" if left else ""
            click.echo(f"{self._made} made, {skipped} skipped, {failed} failed{rest}")

    def _make(self, job: Job, pipeline: Pipeline) -> None:
        request, options, plan = job.request, job.options, self._plan
        started, done = time.monotonic(), 0

        def on_step(step: int, total: int) -> None:
            nonlocal done
            progress.advance(step - done)  # the scan form tells of many at once
            done = step

        for path in job.videos[:1]:  # it may have gone since the start, hours ago
            check_folder(path.parent)
        inputs = plan.inputs_of(job)
        label = f"[{request.index}/{request.total}] denoise" if plan.many else "denoise"
        with Progress(options["num_steps"] * job.num_segments, label) as progress:
            result = pipeline.generate(
                options["prompt"],
                options["negative_prompt"],
                latents=plan.noise,
                inputs=inputs,
                on_step=on_step,
                **{name: options[name] for name in _GENERATION if name in options},
            )
        with pipeline.timings.phase("encode_video"):
            for index in job.missing:
                facts = {**result.options, **job.metadata, "video": index}
                write_video(result.frames[index], job.videos[index], job.fps, facts, self._overwrite)
        if job.latents is not None:
            _write_latents(job.latents, result.latents)
        start = f"seed {options['seed']}" if plan.noise is None else f"latents {job.metadata['latents']}"
        seconds = time.monotonic() - started
        for index in job.missing:
            if plan.many:
                place = f"[{request.index}/{request.total}] "
                click.echo(f"{place}wrote {job.videos[index]} ({start}, {seconds:.1f} s)")
            else:
                click.echo(f"wrote {job.videos[index]} ({plan.profile.name}, {start})")


def _write_latents(path: Path, latents: np.ndarray) -> None:
    """Writes the latents atomically, under exactly this name."""
    buffer = io.BytesIO()
    np.save(buffer, latents)
    try:
        replace_file(path, buffer.getvalue())
    except OSError as error:
        raise UsageError(f"the latents {path} cannot be written", found=error.strerror) from error


@contextmanager
def tracing(folder: Path | None) -> Iterator[None]:
    """Records a jax.profiler trace of a block into a folder; nothing where it is None.

    Raises:
        UsageError: if the folder cannot be made, or the trace not be written.
    """
    if folder is None:
        yield
        return
    import jax

    try:
        folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(folder)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"no trace can be written to {folder}", found=error) from error
    try:
        yield
    except BaseException:  # Ctrl-C too; what ended the block is what is told
        with suppress(OSError, RuntimeError):
            jax.profiler.stop_trace()
        raise
    try:
        jax.profiler.stop_trace()
    except (OSError, RuntimeError) as error:
        raise UsageError(f"no trace can be written to {folder}", found=error) from error
