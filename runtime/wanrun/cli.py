"""The ``wanrun`` command: parse, check what can be checked for free, load, generate, write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wanrun import __version__
from wanrun.console import SIZE, Progress, run

if TYPE_CHECKING:
    import numpy as np


def _warn(message: str) -> None:
    click.echo(f"warning: {message}", err=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--artifact", type=click.Path(path_type=Path), required=True, help="The artifact's folder.")
@click.option("--list", "list_only", is_flag=True, help="Print the built profiles and targets, and exit.")
@click.option("--prompt", help="What to show.")
@click.option("--negative-prompt", help="What to avoid.  [default: the artifact's]")
@click.option("--size", type=SIZE, help="Width x height in pixels.  [default: the first built]")
@click.option("--frames", type=int, help="Frames.  [default: the first built]")
@click.option("--steps", type=int, help="Denoising steps.  [default: the artifact's]")
@click.option(
    "--guidance-scale", type=float, help="Guidance; at most 1 turns it off.  [default: the artifact's]"
)
@click.option("--flow-shift", type=float, help="Shift of the sigmas.  [default: the artifact's]")
@click.option("--solver", type=click.Choice(["unipc", "dpm++", "euler"]), help="[default: the artifact's]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the initial noise.")
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
    help=".mp4, .gif, .webp, .png or .npy.",
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
@click.option("--timing", is_flag=True, help="Print a timing summary.")
@click.option("--timing-json", type=click.Path(path_type=Path), help="Write the timings to this file.")
@click.option("--debug", is_flag=True, help="Print tracebacks.")
@click.version_option(__version__, prog_name="wanrun")
def wanrun(list_only: bool, artifact: Path, **options: Any) -> None:
    """Makes a video from an artifact: restores, executes, writes. No model code, tracing or compiling."""
    if list_only:
        _print_list(artifact)
    else:
        _generate(artifact, **options)


def _print_list(artifact: Path) -> None:
    from wanrun.manifest import read_manifest

    manifest = read_manifest(artifact)
    click.echo(f"{manifest.model['variant']}  {manifest.content_digest}")
    for profile in sorted(manifest.profiles.values(), key=lambda profile: profile.index):
        targets = [name for name, target in manifest.targets.items() if profile.name in target.executables]
        click.echo(f"{profile.name}  targets: {', '.join(sorted(targets)) or 'none'}")
    if not manifest.profiles:
        click.echo("no profiles: run wanbuild compile")


def _generate(artifact: Path, **options: Any) -> None:
    from wanrun.pipeline import load
    from wanrun.preflight import preflight
    from wanrun.timing import Timings
    from wanrun.video import write_video

    timings = Timings()
    timings.add("import", 0.0, timings.now())
    manifest, profile, outputs, noise = preflight(artifact, options)
    with load(
        artifact,
        size=(profile.width, profile.height),
        num_frames=profile.num_frames,
        num_videos=profile.num_videos,
        guidance=profile.guidance,
        target=options["target"],
        allow_compile=options["allow_compile"],
        verify=options["verify"],
        timings=timings,
        warn=_warn,
    ) as pipeline:
        steps = options["steps"] or manifest.model["defaults"]["num_steps"]
        with Progress(steps, "denoise") as progress:
            result = pipeline.generate(
                options["prompt"],
                options["negative_prompt"],
                seed=options["seed"],
                num_steps=options["steps"],
                guidance_scale=options["guidance_scale"],
                flow_shift=options["flow_shift"],
                solver=options["solver"],
                latents=noise,
                on_step=lambda step, total: progress.advance(),
            )
    fps = manifest.model["defaults"]["fps"] if options["fps"] is None else options["fps"]
    metadata = {**result.options, "fps": fps, "wanrun": __version__}
    if noise is not None:
        metadata |= {"seed": None, "latents": options["latents"].name}
    with timings.phase("encode_video"):
        for index, path in enumerate(outputs):
            facts = {**metadata, "video": index}
            write_video(result.frames[index], path, fps, facts, options["overwrite"])
    if options["save_latents"] is not None:
        _save_latents(options["save_latents"], result.latents)
    if options["timing_json"] is not None:
        timings.write_json(options["timing_json"])
    start = f"seed {options['seed']}" if noise is None else f"latents {options['latents']}"
    for path in outputs:
        click.echo(f"wrote {path} ({profile.name}, {start})")
    if options["timing"]:
        click.echo(timings.summary())


def _save_latents(path: Path, latents: np.ndarray) -> None:
    """Writes the latents atomically, under exactly this name."""
    import io

    import numpy as np

    from wanrun.errors import UsageError
    from wanrun.files import replace_file

    buffer = io.BytesIO()
    np.save(buffer, latents)
    try:
        replace_file(path, buffer.getvalue())
    except OSError as error:
        raise UsageError(f"the latents {path} cannot be written", found=error.strerror) from error


def main() -> None:
    """Entry point of ``wanrun``."""
    sys.exit(run(wanrun))
