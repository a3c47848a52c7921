"""``python -m tinywan``: draws a caption's video, shows one as a contact sheet, judges one."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
from PIL import Image

from tinywan.captions import CaptionError, read_caption, unknown_words
from tinywan.contact_sheet import contact_sheet
from tinywan.drawing import FRAMES, HEIGHT, WIDTH, draw
from tinywan.judge import Verdict, judge
from tinywan.scenes import Scene

FILE = click.Path(dir_okay=False, path_type=Path)


@click.group()
def main() -> None:
    """Videos of moving shapes: drawn, shown and judged."""


@main.command("draw")
@click.argument("caption")
@click.option("--output", type=FILE, required=True, help="A .png for the first frame, a .npy for all.")
@click.option("--frames", default=FRAMES, show_default=True)
@click.option("--size", default=f"{WIDTH}x{HEIGHT}", show_default=True, help="Width and height.")
@click.option("--seed", default=0, show_default=True)
def draw_command(caption: str, output: Path, frames: int, size: str, seed: int) -> None:
    """Draws the video that CAPTION tells of."""
    width, height = map(int, size.split("x"))
    video = draw(_scene(caption), frames, height, width, np.random.default_rng(seed))
    if output.suffix == ".npy":
        np.save(output, video)
    else:
        Image.fromarray(video[0]).save(output)


def _frames_of(video: Path) -> np.ndarray:
    """Returns the frames of a video file, uint8 (F, H, W, 3)."""
    from wanrun.media.read_video import read_video

    return np.stack([np.asarray(frame) for frame in read_video(video, "VIDEO")])


@main.command("show")
@click.argument("video", type=click.Path(exists=True, path_type=Path))
@click.option("--prompt", required=True, help="Written below the frames.")
@click.option("--sheet", type=FILE, required=True, help="The contact sheet, a .png.")
@click.option("--score/--no-score", default=True, help="Judge the video by its prompt, a caption.")
@click.option("--at-least", default=0.0, help="Fail if the score is lower, or a flaw too large.")
def show_command(video: Path, prompt: str, sheet: Path, score: bool, at_least: float) -> None:
    """Makes a contact sheet of VIDEO, a .mp4 or .npy, and says which facts of its prompt hold.

    It says its flaws too, those that are too large in capitals.
    """
    frames = np.load(video) if video.suffix == ".npy" else _frames_of(video)
    verdict, why = None, None
    if score:
        try:
            verdict = judge(frames, prompt)
        except CaptionError as error:
            why = str(error)
    text = prompt
    if verdict is not None:
        drawn = ", badly drawn" if verdict.badly_drawn else ""
        text = f"{prompt}   (score {verdict.score:.2f}{drawn})"
    contact_sheet(frames, text).save(sheet, optimize=True)
    click.echo(f"contact sheet: {sheet}")
    if score and (words := unknown_words(prompt)):
        click.echo(
            f"words that the model has not learned: {', '.join(words)}; it knows those of docs/demo.md"
        )
    if why is not None:
        click.echo(f"not judged: {why}")
        if at_least > 0:
            raise click.ClickException(
                f"nothing could be judged; expected a score of at least {at_least:.2f}"
            )
    if verdict is not None:
        _tell(verdict)
        if at_least > 0:
            _require(verdict, at_least)


def _tell(verdict: Verdict) -> None:
    """Prints the facts and the flaws."""
    facts = ", ".join(f"{fact} {'yes' if holds else 'NO'}" for fact, holds in verdict.facts.items())
    click.echo(f"score: {verdict.score:.2f} ({facts})")
    flaws = (f"{flaw.name.upper() if flaw.too_large else flaw.name} {flaw}" for flaw in verdict.flaws)
    click.echo(f"flaws: {'; '.join(flaws)}")


def _require(verdict: Verdict, score: float) -> None:
    """Fails if a video is not as it should be."""
    if verdict.score < score:
        raise click.ClickException(f"the score is {verdict.score:.2f}; expected at least {score:.2f}")
    if verdict.badly_drawn:
        names = ", ".join(flaw.name for flaw in verdict.badly_drawn)
        raise click.ClickException(f"the video is badly drawn, though its facts hold: {names}")


def _scene(caption: str) -> Scene:
    try:
        return read_caption(caption)
    except CaptionError as error:
        raise click.BadParameter(str(error), param_hint="caption") from error


if __name__ == "__main__":
    main()
