"""The ``wanrun`` command: parses the options, makes the cheap checks first, loads, generates and writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wanrun import __version__
from wanrun.command import CONTEXT_SETTINGS, ENVIRONMENT, SEED, Command, options_of, takes_artifact
from wanrun.errors import UsageError
from wanrun.request.rows import rows
from wanrun.rows import Row
from wanrun.terminal.console import NUMBERS, SIZE
from wanrun.terminal.lines import print_result, report

if TYPE_CHECKING:
    from wanrun.cluster.process_group import ProcessGroup
    from wanrun.jobs.batch import Batch
    from wanrun.jobs.run import RunOptions
    from wanrun.jobs.worklist import Worklist
    from wanrun.timing.timings import Timings


def _section(row: Row) -> str:
    """Returns the help's section of a generation option: that of the only model that has it, if there is."""
    if row.name == "negative_prompt":
        return "Prompts"
    if not row.models:
        return "Sampling"
    model = row.models.partition(" with ")[0]
    return "Images" if "," in model else model[0].upper() + model[1:]


def _click_option(row: Row) -> Callable[[Any], Any]:
    """Returns the decorator that adds a generation option to a command."""
    kind: Any = click.Choice(row.choices) if row.choices and row.base is str else row.base
    if row.name == "size":
        kind = SIZE
    if row.name == "seed":
        kind = SEED
    if row.numbers:
        kind = NUMBERS
    models = f" ({row.models})" if row.models else ""
    default = f"  [default: {row.default}]" if row.default else ""
    return options_of(_section(row))(
        row.flag,
        row.name,
        type=kind,
        multiple=row.many,
        metavar=None if row.choices and row.base is str else row.value,
        help=f"{row.help.rstrip('.')}{models}.{default}",
    )


def _generation_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds every generation option except the prompt to a command."""
    for row in reversed(rows()):
        if row.name != "prompt":
            function = _click_option(row)(function)
    return function


_prompts, _results, _loading = map(options_of, ("Prompts", "Results", "Loading"))
_measuring, _several = map(options_of, ("Measuring", "Several processes"))


@click.command(
    cls=Command,
    no_args_is_help=True,
    context_settings=dict(CONTEXT_SETTINGS),
)
@takes_artifact(ENVIRONMENT)
@options_of("Artifact")(
    "--list", "list_only", is_flag=True, help="Print the built profiles and targets, and exit."
)
@_prompts("--prompt", help="Description of the video; may be empty.")
@_prompts(
    "--prompts",
    type=click.Path(path_type=Path, allow_dash=True),
    help="A file of prompts, one per line, or JSON lines with prompt and any of the options from "
    "--negative-prompt to --fps, and output; - reads standard input. The command line's options apply to "
    "lines without them. A line that fails is reported, and the others are made; finished ones are skipped.",
)
@_generation_options
@_results("--latents", type=click.Path(path_type=Path), help="Initial noise, float32 .npy (B, C, T, h, w).")
@_results("--save-latents", type=click.Path(path_type=Path), help="Write the final latents to this .npy.")
@_results(
    "--output",
    type=click.Path(path_type=Path),
    help=".mp4, .gif, .webp, .png or .npy. {index} or {index:04}, {seed} and {slug} (the prompt's first "
    "words) are filled in. With several prompts out.mp4 is out-{index}.mp4.  [default: out.mp4; of a single "
    "prompt out-2.mp4 and so on, if that is there]",
)
@_results("--overwrite", is_flag=True, help="Replace an existing output.")
@_loading("--target", help="A built target.  [default: the one that matches this machine]")
@_loading(
    "--allow-compile",
    is_flag=True,
    help="Compile programs without a fitting executable, into the user's cache.",
)
@_loading(
    "--retune",
    is_flag=True,
    help="Compile the programs on this machine too, and keep those that are faster in the user's cache, for "
    "later runs.",
)
@_loading(
    "--verify",
    type=click.Choice(["fast", "sha256"]),
    default="fast",
    show_default=True,
    help="Checksums of the weights to check while reading.",
)
@_loading(
    "--memory",
    type=click.Choice(["auto", "low"]),
    default="auto",
    show_default=True,
    help="low: release the text encoder after the prompts are encoded, and hold one expert at a time.",
)
@_loading(
    "--transfer",
    type=click.Choice(["auto", "direct", "staged"]),
    default="auto",
    show_default=True,
    help="staged: each device of a mesh is given some rows of large weights, and devices exchange the rest; "
    "direct: each is given all that it needs.",
)
@_loading(
    "--text-encoder",
    type=click.Choice(["jax", "torch"]),
    default="jax",
    show_default=True,
    help="torch needs the torch extra.",
)
@_loading(
    "--text-encoder-device",
    metavar="DEVICE",
    help="cpu: run the artifact's CPU program of the text encoder beside an accelerator. With --text-encoder "
    "torch, a device of torch.  [default: where the other programs run; with torch, cpu]",
)
@_loading(
    "--no-embedding-cache", is_flag=True, help="Neither read nor write the user's cache of prompt embeddings."
)
@_loading(
    "--weights",
    metavar="URL",
    help="Folder, or URL (gs, s3, http; the remote extra), of the weights.  [default: in the artifact]",
)
@_measuring("--warmup", is_flag=True, help="Execute every program once before the first prompt.")
@_measuring("--timing", is_flag=True, help="Print a timing summary.")
@_measuring("--timing-json", type=click.Path(path_type=Path), help="Write the timings to this file.")
@_measuring(
    "--timing-trace",
    type=click.Path(path_type=Path),
    help="Write a timeline of the run to this file, which ui.perfetto.dev opens.",
)
@_measuring(
    "--trace",
    type=click.Path(path_type=Path),
    help="Write a jax.profiler trace of the generation to this folder.",
)
@_several(
    "--distributed",
    is_flag=True,
    help="Run with the other processes of this TPU pod, Slurm step or Kubernetes job.",
)
@_several(
    "--coordinator",
    metavar="HOST:PORT",
    help="Where process 0 of a run of several processes waits for the others.",
)
@_several("--num-processes", type=int, metavar="N", help="How many processes there are.")
@_several(
    "--process-id", type=int, metavar="N", help="The number of this one; 0 prints and writes the video."
)
@click.option("--debug", is_flag=True, help="Print tracebacks.")
@click.version_option(__version__, prog_name="wanrun")
def wanrun(list_only: bool, artifact: Path, **options: Any) -> int:
    """Makes videos from an artifact: restores, executes, writes. No model code, tracing or compiling."""
    if not list_only:
        return _generate(artifact, options)
    _print_list(artifact)
    return 0


def _print_list(artifact: Path) -> None:
    from wanrun.artifact.manifest import read_manifest

    manifest = read_manifest(artifact)
    print_result(f"{manifest.model.variant}  {manifest.content_digest}")
    for profile in sorted(manifest.profiles.values(), key=lambda profile: profile.index):
        targets = [name for name, target in manifest.targets.items() if profile.name in target.executables]
        print_result(f"{profile.name}  targets: {', '.join(sorted(targets)) or 'none'}")
    if not manifest.profiles:
        print_result("no profiles: run wanbuild compile")


def _generate(artifact: Path, options: dict[str, Any]) -> int:
    """Makes the requested videos and returns the exit code."""
    from wanrun.jobs.run import RunOptions
    from wanrun.jobs.worklist import make_worklist
    from wanrun.timing.timings import Timings

    timings = Timings()
    timings.add("import", 0.0, timings.now())
    names = {row.name for row in rows()} - {"prompt"}
    given = {name: value for name, value in options.items() if name in names and value not in (None, ())}
    how = RunOptions(**{name: value for name, value in options.items() if name not in names})
    if _of_several(how):
        from wanrun.jobs.several import worklist_of_several

        with worklist_of_several(artifact, how, given, timings) as (work, how, group):
            return _make(artifact, how, work, timings, group)
    return _make(artifact, how, make_worklist(artifact, how, given, timings), timings)


def _make(
    artifact: Path, how: RunOptions, work: Worklist, timings: Timings, group: ProcessGroup | None = None
) -> int:
    with timings.phase("import"):
        from wanrun.jobs.batch import Batch
        from wanrun.terminal.status import Status

    leads = group is None or group.leads
    status = Status(lambda: timings.activities.running if leads else ())
    batch = Batch(work, how.overwrite, timings, leads, status)
    batch.report_worklist()
    try:
        if work.jobs:
            with status:
                _run(artifact, how, work, batch, timings, group)
    except Exception:
        with contextlib.suppress(UsageError):  # the error that ended the run is the one to report
            _write_timings(how, timings)
        raise
    finally:
        batch.report_count()
    _write_timings(how, timings)
    if how.timing and leads:
        from wanrun.timing.waterfall import waterfall

        picture = waterfall(timings.labelled_spans, 0.0, timings.now())
        report(*timings.summary().split("\n"), *picture)
    return batch.exit_code


def _write_timings(how: RunOptions, timings: Timings) -> None:
    from wanrun.jobs.timing_files import write_timings

    write_timings(timings, how.timing_json, how.timing_trace)


def _run(
    artifact: Path,
    how: RunOptions,
    work: Worklist,
    batch: Batch,
    timings: Timings,
    group: ProcessGroup | None,
) -> None:
    """Loads the pipeline and makes the videos that do not exist yet."""
    with timings.phase("import"):
        from wanrun.generation.pipeline import load
        from wanrun.jobs.batch import tracing
        from wanrun.opened.policy import choices_of

    _try_ahead(artifact, how, work, timings, batch)
    draft, low, first = work.jobs[0].draft, how.memory == "low", None
    with contextlib.suppress(UsageError):  # reported in the job's turn
        first = work.inputs_of(work.jobs[0])
    with load(
        artifact,
        **choices_of(draft.profile),
        target=how.target,
        allow_compile=how.allow_compile,
        retune=how.retune,
        verify=how.verify,
        memory=how.memory,
        transfer=how.transfer,
        loop=draft.options["loop"],
        first_expert=work.first_expert,
        text_encoder=how.text_encoder,
        text_encoder_device=how.text_encoder_device,
        embeddings="artifact" if how.no_embedding_cache else "all",
        weights=how.weights,
        # These prompts are encoded before the first step: all of them if the text encoder is released then.
        prompts=work.first_prompts(None if low else 1),
        inputs=first,
        timings=timings,
        warn=batch.warn,
        report=batch.note,
        group=group,
    ) as pipeline:
        if how.warmup:
            pipeline.warmup(timings)
        with tracing(how.trace):
            batch.run(pipeline)


def _try_ahead(artifact: Path, how: RunOptions, work: Worklist, timings: Timings, batch: Batch) -> None:
    """Tries executables that were built elsewhere of all profiles of the prompts, before one is loaded."""
    profiles = {job.draft.profile.name: job.draft.profile for job in work.jobs}
    if len(profiles) == 1 or _of_several(how):
        return
    from wanrun.generation.opening import Opening
    from wanrun.opened.policy import LoadPolicy

    policy = LoadPolicy(allow_compile=how.allow_compile, weights=how.weights)
    Opening(artifact, {"target": how.target}, policy, timings, batch.warn, batch.note).try_ahead(
        profiles.values()
    )


def _of_several(how: RunOptions) -> bool:
    """Whether the options ask for a run of several processes."""
    numbers = (how.coordinator, how.num_processes, how.process_id)
    return how.distributed or any(value is not None for value in numbers)
