"""The ``wanrun`` command: parse, check what can be checked for free, load, generate, write."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wanrun import __version__
from wanrun.console import SIZE, run
from wanrun.errors import UsageError

if TYPE_CHECKING:
    from wanrun.jobs.batch import Batch
    from wanrun.jobs.preflight import Plan
    from wanrun.timing import Timings


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--artifact", type=click.Path(path_type=Path), required=True, help="The artifact's folder.")
@click.option("--list", "list_only", is_flag=True, help="Print the built profiles and targets, and exit.")
@click.option("--prompt", help="What to show.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, allow_dash=True),
    help="A file of prompts, one a line, or JSON lines with prompt and optionally negative_prompt, seed, "
    "steps, guidance_scale, guidance_scale_2, boundary, flow_shift, solver, fps, output, and the options "
    "from --image to --segment-overlap; - reads standard input. What a line leaves out is the option's. A "
    "line that fails is reported, the others are made; what is there already is skipped.",
)
@click.option("--negative-prompt", help="What to avoid.  [default: the artifact's]")
@click.option(
    "--image",
    metavar="FILE",
    help="What the video begins with (Wan I2V, FLF2V, TI2V), or the character (Animate).",
)
@click.option(
    "--last-image", metavar="FILE", help="What the video ends with (FLF2V; Wan 2.2 I2V, which needs none)."
)
@click.option(
    "--video", metavar="DIR|FILE", help="What controls the video, a folder of frames or a file (VACE)."
)
@click.option("--mask", metavar="DIR|FILE", help="White where --video is made anew (VACE).  [default: all]")
@click.option(
    "--reference-image", metavar="FILE", multiple=True, help="What the video shows; repeatable (VACE)."
)
@click.option("--pose-video", metavar="DIR|FILE", help="The poses to take (Animate).")
@click.option("--face-video", metavar="DIR|FILE", help="The face whose expressions to take (Animate).")
@click.option(
    "--background-video", metavar="DIR|FILE", help="What the character is put into (Animate, --mode replace)."
)
@click.option(
    "--mask-video", metavar="DIR|FILE", help="White where the character goes (Animate, --mode replace)."
)
@click.option(
    "--mode",
    type=click.Choice(["animate", "replace"]),
    help="Animate the character, or put it in the place of a video's (Animate).  [default: animate]",
)
@click.option(
    "--conditioning-scale",
    type=float,
    help="Strength of what controls the video (VACE).  [default: the artifact's]",
)
@click.option(
    "--segment-overlap",
    type=int,
    help="Frames that a part of a long video shares with the one before, 1 or 5 (Animate).  [default: 1]",
)
@click.option("--size", type=SIZE, help="Width x height in pixels.  [default: the first built]")
@click.option("--frames", type=int, help="Frames; of Animate, of each part.  [default: the first built]")
@click.option("--steps", type=int, help="Denoising steps.  [default: the artifact's]")
@click.option(
    "--guidance-scale", type=float, help="Guidance; at most 1 turns it off.  [default: the artifact's]"
)
@click.option(
    "--guidance-scale-2",
    type=float,
    help="Guidance of the low-noise expert, where --guidance-scale is above 1.  [default: the given "
    "--guidance-scale, else the artifact's]",
)
@click.option(
    "--boundary",
    type=float,
    help="Share of the training timesteps below which the low-noise expert runs, 0 to 1.  [default: the "
    "artifact's]",
)
@click.option("--flow-shift", type=float, help="Shift of the sigmas.  [default: the artifact's]")
@click.option("--solver", type=click.Choice(["unipc", "dpm++", "euler"]), help="[default: the artifact's]")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the initial noise, of every prompt."
)
@click.option("--num-videos", type=int, default=1, show_default=True, help="Videos per prompt.")
@click.option(
    "--latents", type=click.Path(path_type=Path), help="Initial noise, float32 .npy (B, C, T, h, w)."
)
@click.option("--save-latents", type=click.Path(path_type=Path), help="Write the final latents to this .npy.")
@click.option("--fps", type=float, help="Frames per second of the video.  [default: the artifact's]")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("out.mp4"),
    show_default=True,
    help=".mp4, .gif, .webp, .png or .npy. {index} or {index:04}, {seed} and {slug} (the prompt's first "
    "words) are filled in. With several prompts out.mp4 is out-{index}.mp4.",
)
@click.option(
    "--loop",
    type=click.Choice(["step", "scan"]),
    help="How the steps run: an executable called for each, or one for all of an expert's, without progress, "
    "and Ctrl-C waits for its end.  [default: step if it is built, else scan]",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--target", help="A built target.  [default: the one that matches this machine]")
@click.option(
    "--allow-compile", is_flag=True, help="Compile what has no fitting executable, into the user's cache."
)
@click.option(
    "--verify",
    type=click.Choice(["fast", "sha256"]),
    default="fast",
    show_default=True,
    help="Checksums of the weights to check while reading.",
)
@click.option(
    "--memory",
    type=click.Choice(["auto", "low"]),
    default="auto",
    show_default=True,
    help="low: let go of the text encoder when the prompts are encoded, and hold one expert at a time.",
)
@click.option(
    "--text-encoder",
    type=click.Choice(["jax", "torch"]),
    default="jax",
    show_default=True,
    help="torch needs the torch extra.",
)
@click.option("--text-encoder-device", default="cpu", show_default=True, help="Device of the torch encoder.")
@click.option(
    "--no-embedding-cache", is_flag=True, help="Neither read nor write the user's cache of prompt embeddings."
)
@click.option("--weights", metavar="URL", help="Where the weights lie.  [default: in the artifact]")
@click.option("--warmup", is_flag=True, help="Execute every program once before the first prompt.")
@click.option("--timing", is_flag=True, help="Print a timing summary.")
@click.option("--timing-json", type=click.Path(path_type=Path), help="Write the timings to this file.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Write a jax.profiler trace of the generation to this folder.",
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
    click.echo(f"{manifest.model['variant']}  {manifest.content_digest}")
    for profile in sorted(manifest.profiles.values(), key=lambda profile: profile.index):
        targets = [name for name, target in manifest.targets.items() if profile.name in target.executables]
        click.echo(f"{profile.name}  targets: {', '.join(sorted(targets)) or 'none'}")
    if not manifest.profiles:
        click.echo("no profiles: run wanbuild compile")


def _generate(artifact: Path, options: dict[str, Any]) -> int:
    """Makes what was asked for, and returns the exit code."""
    from wanrun.jobs.preflight import preflight
    from wanrun.timing import Timings

    timings = Timings()
    timings.add("import", 0.0, timings.now())
    plan = preflight(artifact, options, timings)
    with timings.phase("import"):
        from wanrun.jobs.batch import Batch

    batch = Batch(plan, options["overwrite"])
    batch.report_plan()
    try:
        if plan.jobs:
            _run(artifact, options, plan, batch, timings)
    except Exception:
        if options["timing_json"] is not None:
            with contextlib.suppress(UsageError):  # what ended the run is what is told
                timings.write_json(options["timing_json"])
        raise
    finally:
        batch.report_count()
    if options["timing_json"] is not None:
        timings.write_json(options["timing_json"])
    if options["timing"]:
        click.echo(timings.summary())
    return batch.exit_code


def _run(artifact: Path, options: dict[str, Any], plan: Plan, batch: Batch, timings: Timings) -> None:
    """Loads, and makes what is not there yet."""
    with timings.phase("import"):
        from wanrun.generation.pipeline import load
        from wanrun.jobs.batch import tracing

    profile, low, first = plan.profile, options["memory"] == "low", None
    with contextlib.suppress(UsageError):  # which is told in the job's turn
        first = plan.inputs_of(plan.jobs[0])
    with load(
        artifact,
        size=(profile.width, profile.height),
        num_frames=profile.num_frames,
        num_videos=profile.num_videos,
        guidance=profile.guidance,
        num_references=profile.num_references,
        target=options["target"],
        allow_compile=options["allow_compile"],
        verify=options["verify"],
        memory=options["memory"],
        loop=plan.loop,
        first_expert=plan.first_expert,
        text_encoder=options["text_encoder"],
        text_encoder_device=options["text_encoder_device"],
        embeddings="artifact" if options["no_embedding_cache"] else "all",
        weights=options["weights"],
        # What load is told of is encoded before the first step: all of it where the text encoder goes then.
        prompts=plan.first_prompts(None if low else 1),
        inputs=first,
        timings=timings,
        warn=batch.warn,
        report=functools.partial(click.echo, err=True),
    ) as pipeline:
        if options["warmup"]:
            pipeline.warmup()
        with tracing(options["trace"]):
            batch.run(pipeline)


def main() -> None:
    """Entry point of ``wanrun``."""
    sys.exit(run(wanrun))
