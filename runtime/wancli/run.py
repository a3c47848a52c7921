"""The ``wanrun`` command: parses the options, makes the cheap checks first, loads, generates and writes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

import wanhub
from wancli.click_options import click_option, section_of
from wancli.command import ENVIRONMENT, InputPath, Wanrun, options_of, takes_artifact
from wancli.jobs.run_options import RunOptions
from wancli.listing import check_whole, explain_targets, print_list
from wanrun import __version__
from wanrun.artifact.overlay import overlaid
from wanrun.errors import UsageError
from wanrun.request.request import PROMPTS
from wanrun.request.schema import rows
from wanrun.rows import record_of, rows_of
from wanrun.terminal.lines import print_error, print_result, report
from wanrun.terminal.pictures import pictures_here
from wanrun.terminal.status import Status
from wanrun.undo import undone_at_exit

if TYPE_CHECKING:
    from wancli.jobs.batch import Batch
    from wancli.jobs.worklist import Worklist
    from wanrun import Artifact, Timings
    from wanrun.cluster.process_group import ProcessGroup


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds every option of a generation and of a whole run to a command, in the order of the table."""
    run = [row for row in rows_of(RunOptions) if row.section]
    first = [row for row in run if row.section == PROMPTS]
    generation = [row for row in rows() if row.name != "prompt"]
    for row in reversed([*first, *generation, *(row for row in run if row not in first)]):
        function = click_option(row, section_of(row))(function)
    return function


@click.command(cls=Wanrun)
@takes_artifact(ENVIRONMENT)
@options_of("Artifact")(
    "--list", "list_only", is_flag=True, help="Print the built profiles and targets, and exit."
)
@options_of("Artifact")(
    "--check", "check_only", is_flag=True, help="Read all of the artifact, check every sha256, and exit."
)
@options_of("Artifact")("--explain", is_flag=True, help="Say why each target is taken, or why not.")
@options_of("Artifact")(
    "--require-signature",
    "public_key",
    type=InputPath(),
    metavar="KEY",
    help="Refuse an artifact that was not signed with this key (PEM), or whose files differ.",
)
@_options
@click.version_option(__version__, prog_name="wanrun")
def wanrun(
    list_only: bool, check_only: bool, explain: bool, public_key: Path | None, artifact: Path, **options: Any
) -> int:
    """Makes videos from an artifact: restores, executes, writes. No model code, tracing or compiling.

    wanrun serve ARTIFACT... answers over HTTP, and has a page (wanrun serve --help).
    """
    signed = public_key is not None
    if signed and options.get("build"):
        raise UsageError(
            "conflict", "--build makes what is not signed", remedy="leave it or --require-signature out"
        )

    @functools.cache
    def opened() -> Artifact:
        found = wanhub.open_artifact(artifact, print_error)
        return found if signed or check_only else overlaid(found)

    if public_key is not None:
        wanhub.check_signed(opened(), public_key)
        options["verify"] = "sha256"  # also of what is read now
    if explain:
        explain_targets(opened(), print_result if list_only else print_error)
    if not (list_only or check_only):
        return _generate(opened, options)
    if list_only:
        print_list(opened())
    if check_only:
        check_whole(opened())
    return 0


def _generate(opened: Callable[[], Artifact], options: dict[str, Any]) -> int:
    """Makes the requested videos and returns the exit code."""
    from wancli.jobs.worklist import make_worklist
    from wanrun import Timings

    timings = Timings()
    timings.add("import", 0.0, timings.now())
    names = {row.name for row in rows()} - {"prompt"}
    options = {name: value for name, value in options.items() if value not in (None, ())}
    given = {name: value for name, value in options.items() if name in names}
    how = record_of(RunOptions, {name: value for name, value in options.items() if name not in names})
    if how.live or how.seconds is not None:
        from wancli.jobs.live_batch import asked_live

        how, given = asked_live(how, given)
    if how.of_several:
        from wancli.jobs.several import worklist_of_several

        with worklist_of_several(opened, how, given, timings) as (work, how, group):
            return _make(how, work, timings, group)
    with Status(lambda: timings.running):
        work = make_worklist(opened, how, given, timings)
    return _make(how, work, timings)


def _make(how: RunOptions, work: Worklist, timings: Timings, group: ProcessGroup | None = None) -> int:
    """Makes the videos of a worklist, writes the report and the times; returns the exit code."""
    with timings.phase("import"):
        from wancli.jobs.batch import Batch
        from wancli.jobs.hours import Hours
        from wancli.jobs.output_names import write_timings

    leads = group is None or group.leads
    status = Status(lambda: timings.running if leads else ())
    pictures = pictures_here() if leads else None
    hours = None if group is not None or how.live else Hours(work.artifact, work.jobs, how)
    if how.live:
        from wancli.jobs.live_batch import LiveBatch

        batch: Batch = LiveBatch(work, how, timings, status)
    else:
        ahead, as_json = group is None, how.json_errors
        batch = Batch(work, how.overwrite, timings, leads, status, ahead, pictures, hours, as_json)
    batch.report_worklist()
    if hours is not None:
        hours.announce(print_error)
    with work.store or contextlib.nullcontext(), contextlib.ExitStack() as ending:
        if how.report is not None:
            from wanreport.run_report import reported

            ending.enter_context(reported(how.report, how, work, batch.outcomes, timings))
        try:
            if work.jobs:
                with status, undone_at_exit(batch.say_count):
                    _run(how, work, batch, timings, group)
        except Exception:
            with contextlib.suppress(UsageError):  # the error that ended the run is the one to report
                write_timings(timings, how.timing_json)
            raise
        finally:
            batch.report_count()
        write_timings(timings, how.timing_json)
    if how.timing and leads:
        report(*timings.summary().split("\n"))
    return batch.exit_code


def _run(how: RunOptions, work: Worklist, batch: Batch, timings: Timings, group: ProcessGroup | None) -> None:
    """Loads the pipeline and makes the videos that do not exist yet."""
    with timings.phase("import"):
        from wancli.jobs.worklist import fetch_needed
        from wanrun import load

    generation, first = work.jobs[0].job.generation, None
    with contextlib.suppress(UsageError):  # reported in the job's turn
        first = work.media.inputs(generation)
    form = generation.options["loop"]
    loading = structs.replace(
        how.loading,
        profile=generation.profile.name,
        loop=form,
        memory="stream" if form == "stream" else how.loading.memory,
        first_expert=generation.ranges[0].transformer,
    )
    fetch_needed(work, structs.asdict(loading), timings, how.warmup)
    with load(
        work.artifact,
        **structs.asdict(loading),
        # These prompts are encoded before the first step: all of them if the text encoder is released then.
        prompts=work.first_prompts(None if loading.low_memory else 1),
        inputs=first,
        later=() if how.of_several else [one.job.generation.profile.name for one in work.jobs],
        timings=timings,
        warn=batch.warn,
        report=batch.note,
        group=group,
    ) as pipeline:
        if how.warmup:
            pipeline.warmup(timings)
        batch.run(pipeline)
