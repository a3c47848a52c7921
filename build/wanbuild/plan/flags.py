"""The options of ``wanbuild plan``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from wanbuild.targets.mesh import parse_mesh
from wancli.command import SIZE
from wanrun.artifact.roles import FORMS

_STORED = click.Choice(["bfloat16", "float32"])

_OPTIONS = (
    click.argument("subject"),
    click.option(
        "--target", required=True, metavar="CHIP[-N]", help="A chip, and how many: v7x-8, h200, v6e-w8a8."
    ),
    click.option("--size", type=SIZE, help="[default: the model's published size]"),
    click.option("--frames", type=int, help="4n + 1.  [default: the model's published frame count]"),
    click.option(
        "--guidance/--no-guidance",
        default=None,
        help="Whether guidance doubles the batch.  [default: the model's]",
    ),
    click.option("--steps", type=click.IntRange(min=1), help="Denoising steps.  [default: the model's]"),
    click.option("--num-videos", type=click.IntRange(min=1), help="Videos per prompt.  [default: 1]"),
    click.option(
        "--reference-images",
        "num_references",
        type=click.IntRange(min=0),
        help="Reference images of each video (VACE).  [default: 0]",
    ),
    click.option(
        "--mesh",
        default="",
        metavar="AXIS=N,...",
        callback=lambda _, option, text: parse_mesh(text),
        help="Devices by axis.  [default: the fastest mesh that fits]",
    ),
    click.option(
        "--quantise",
        type=click.Choice(["int8", "float8"]),
        help="Plan weights of 8 bits, as of wanbuild convert.  [default: as a recipe says]",
    ),
    click.option("--dtype", type=_STORED, help="Compute dtype.  [default: bfloat16]"),
    click.option("--vae-dtype", type=_STORED, help="Compute dtype of the VAE.  [default: float32]"),
    click.option(
        "--vae-precision",
        type=click.Choice(["high", "highest"]),
        help="Precision of the VAE's float32 products.  [default: high]",
    ),
    click.option("--vae-decode-chunk", type=click.IntRange(min=1), help="Latent frames decoded at a time."),
    click.option("--vae-encode-chunk", type=click.IntRange(min=1), help="Latent frames encoded at a time."),
    click.option("--loop", type=click.Choice(tuple(FORMS)), help="Form of the loop.  [default: step]"),
    click.option("--all-meshes", is_flag=True, help="List every mesh."),
    click.option("--best", is_flag=True, help="List the fastest known settings for the chip."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the argument and the options of ``wanbuild plan``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
