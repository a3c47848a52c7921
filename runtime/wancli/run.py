"""The ``wanrun`` command: parses the options, makes the cheap checks first, loads, generates and writes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

import wanhub
from wancli.aliases import command_meant
from wancli.command import (
    ENVIRONMENT,
    Command,
    Input,
    fetch,
    options_of,
    takes_artifact,
)
from wancli.jobs.run import RunOptions
from wancli.options import click_option
from wanrun import __version__
from wanrun.artifact.overlay import overlaid
from wanrun.errors import UsageError
from wanrun.request.request import PROMPTS
from wanrun.request.rows import rows
from wanrun.rows import Row, record_of, rows_of
from wanrun.terminal.lines import print_error, print_result, report
from wanrun.terminal.pictures import pictures_here
from wanrun.terminal.status import Status
from wanrun.undo import undone_at_exit

if TYPE_CHECKING:
    from wancli.jobs.batch import Batch
    from wancli.jobs.worklist import Worklist
    from wanrun import Artifact, Timings
    from wanrun.cluster.process_group import ProcessGroup


def _section(row: Row) -> str:
    """Returns the help's section of an option; of a generation's, that of the only model that has it."""
    if row.section:
        return row.section
    if not row.models:
        return "Sampling"
    model = row.models.partition(" with ")[0]
    return "Images" if "," in model else model[0].upper() + model[1:]


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds every option of a generation and of a whole run to a command, in the order of the table."""
    run = [row for row in rows_of(RunOptions) if row.section]
    first = [row for row in run if row.section == PROMPTS]
    generation = [row for row in rows() if row.name != "prompt"]
    for row in reversed([*first, *generation, *(row for row in run if row not in first)]):
        function = click_option(row, _section(row))(function)
    return function


class Wanrun(Command):
    """The command ``wanrun``, whose first word is an artifact, or ``serve``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses arguments; raises UsageError for a word that is meant as a command, or an unknown option."""
        remedy = command_meant("wanrun", args[0], ["serve"]) if args else None
        if remedy is None and len(args) > 1 and not args[0].startswith("-") and Path(args[1]).is_dir():
            remedy = "wanrun ARTIFACT --prompt TEXT makes a video"
        if remedy is not None and not Path(args[0]).exists():
            raise UsageError("unknown_name", f"wanrun has no command {args[0]}", remedy=remedy)
        return super().parse_args(ctx, args)


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
    type=Input(),
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
        _explain(opened(), print_result if list_only else print_error)
    if not (list_only or check_only):
        return _generate(opened, options)
    if list_only:
        _print_list(opened())
    if check_only:
        _check(opened())
    return 0


def _check(artifact: Artifact) -> None:
    from wanrun.intact import check_intact

    fetch(artifact, artifact.named())
    check_intact(artifact, print_result)
    print_result(f"{artifact} is whole: {artifact.manifest.content_digest}")


def _explain(artifact: Artifact, printed: Callable[[str], None]) -> None:
    from wanrun.artifact.select import compared_targets, select_target

    for profile in sorted(artifact.manifest.profiles.values(), key=lambda profile: profile.index):
        taken = select_target(artifact, profile, allow_compile=True).name
        for one in compared_targets(artifact, profile):
            fits = "taken" if one.name == taken else f"fits, and {taken} is preferred"
            printed(f"{profile.name}  {one.name}: {'; '.join(map(str, one.mismatches)) or fits}")


def _print_list(artifact: Artifact) -> None:
    manifest = artifact.manifest
    print_result(f"{manifest.model.variant}  {manifest.content_digest}")
    for profile in sorted(manifest.profiles.values(), key=lambda profile: profile.index):
        targets = [name for name, target in manifest.targets.items() if profile.name in target.executables]
        here = ", built here" if artifact.built_here(profile.name) else ""
        print_result(f"{profile.name}  targets: {', '.join(sorted(targets)) or 'none'}{here}")
    for name, schedule in sorted(manifest.schedules.items(), key=lambda one: -one[1].evaluations):
        print_result(f"schedule {name}  {schedule.describe()}")
    for name, adapter in manifest.adapters.items():
        print_result(f"lora {name}  {adapter.describe()}")
    if not manifest.profiles:
        print_result("no profiles: run wanbuild compile")


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
        from wancli.jobs.live import asked_live

        how, given = asked_live(how, given)
    if how.of_several:
        from wancli.jobs.several import worklist_of_several

        with worklist_of_several(opened, how, given, timings) as (work, how, group):
            return _make(how, work, timings, group)
    with Status(lambda: timings.running):
        work = make_worklist(opened, how, given, timings)
    return _make(how, work, timings)


def _make(how: RunOptions, work: Worklist, timings: Timings, group: ProcessGroup | None = None) -> int:
    with timings.phase("import"):
        from wancli.jobs.batch import Batch
        from wancli.jobs.hours import Hours
        from wancli.jobs.outputs import write_timings

    leads = group is None or group.leads
    status = Status(lambda: timings.running if leads else ())
    pictures = pictures_here() if leads else None
    hours = None if group is not None or how.live else Hours(work.artifact, work.jobs, how)
    if how.live:
        from wancli.jobs.live import LiveBatch

        batch: Batch = LiveBatch(work, how, timings, status)
    else:
        ahead, as_json = group is None, how.json_errors
        batch = Batch(work, how.overwrite, timings, leads, status, ahead, pictures, hours, as_json)
    batch.report_worklist()
    if hours is not None:
        hours.announce(print_error)
    with work.store or contextlib.nullcontext(), contextlib.ExitStack() as ending:
        if how.report is not None:
            from wanreport.run import reported

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


def _run(
    how: RunOptions,
    work: Worklist,
    batch: Batch,
    timings: Timings,
    group: ProcessGroup | None,
) -> None:
    """Loads the pipeline and makes the videos that do not exist yet."""
    with timings.phase("import"):
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
    _fetch(work, structs.asdict(loading), timings, how.warmup)
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


def _fetch(work: Worklist, loading: Mapping[str, Any], timings: Timings, warmup: bool) -> None:
    """Fetches the files of a partial copy that the jobs, and a warm-up, read."""
    if not work.artifact.origin:
        return
    from wanrun import needed

    generations = [planned.job.generation for planned in work.jobs]
    profiles = list({one.profile.name: one.profile for one in generations}.values())
    loras = {one.name for generation in generations for one in generation.loras}
    decoders = {one.options.get("decoder", "full") for one in generations} | ({"full"} if warmup else set())
    names = needed(
        work.artifact,
        loading,
        profiles=profiles,
        prompts=work.first_prompts(),
        loras=loras,
        decoders=decoders,
    )
    wanhub.fetch(work.artifact, names, print_error, lambda progress: timings.phase("fetch", None, progress))
