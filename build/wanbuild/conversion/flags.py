"""The options of ``wanbuild convert``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from wancli.command import Input, takes_artifact

_STORED = click.Choice(["bfloat16", "float32"])
_PATH = Input()


def _part(component: str, what: str) -> Any:
    """Returns the option of a component that is a file of its own."""
    return click.option(f"--{component}", type=_PATH, metavar="FILE", help=f"{what}, a .safetensors file.")


_OPTIONS = (
    click.argument("source", required=False),
    takes_artifact(),
    _part("transformer", "The transformer, or the high-noise expert"),
    _part("transformer-2", "The low-noise expert"),
    _part("vae", "The VAE"),
    _part("text-encoder", "The text encoder"),
    _part("image-encoder", "The image encoder"),
    click.option(
        "--tokenizer",
        type=_PATH,
        metavar="DIR",
        help="The tokenizer's folder, its tokenizer.json, or the hub id of a repository that has one.",
    ),
    click.option(
        "--config",
        metavar="DIR|PART=FILE,...",
        multiple=True,
        help="Configs in place of SOURCE's or of assumed ones: a folder in the diffusers layout, or files. "
        "PART is transformer, transformer_2, vae, text_encoder, image_encoder or scheduler; repeatable.",
    ),
    click.option("--revision", help="Branch, tag or commit, where SOURCE is a hub id.  [default: main]"),
    click.option(
        "--force", is_flag=True, help="Replace an existing artifact; programs that stay valid are kept."
    ),
    click.option(
        "--weights-dtype", type=_STORED, help="Stored dtype of the transformers.  [default: bfloat16]"
    ),
    click.option("--vae-weights-dtype", type=_STORED, help="Stored dtype of the VAE.  [default: float32]"),
    click.option(
        "--text-weights-dtype",
        type=_STORED,
        help="Stored dtype of the text encoder and the image encoder.  [default: bfloat16]",
    ),
    click.option(
        "--lora", metavar="FILE[:SCALE]", multiple=True, help="Merged into every transformer; repeatable."
    ),
    click.option(
        "--lora-high", metavar="FILE[:SCALE]", multiple=True, help="Merged into the high-noise expert."
    ),
    click.option(
        "--lora-low", metavar="FILE[:SCALE]", multiple=True, help="Merged into the low-noise expert."
    ),
    click.option("--negative-prompt", help="Default negative prompt of the artifact."),
    click.option(
        "--sampling",
        metavar="NAME|FILE",
        help="Defaults of a distilled model: lightning-4, causvid-3, fastwan-3, self-forcing-4, or a file "
        "(.toml).",
    ),
    click.option(
        "--default",
        "defaults",
        metavar="NAME=VALUE",
        multiple=True,
        help="Default option of a generation; repeatable. NAME is steps, guidance_scale, guidance_scale_2, "
        "boundary, flow_shift, solver, fps or timesteps (separated by commas).",
    ),
    click.option(
        "--quantise",
        type=click.Choice(["int8", "float8", "source"]),
        help="Store the weights of the transformers' blocks and of the text encoder's feed-forward in "
        "8 bits, with a scale for each row; source: as a source of 8 bits has them.",
    ),
    click.option(
        "--keep",
        metavar="PATTERN",
        multiple=True,
        help="Layers that --quantise leaves as they are, such as 'blocks/attn2/*' or 'text_encoder/*'; "
        "repeatable.",
    ),
    click.option("--threads", type=click.IntRange(min=1), help="Worker threads.  [default: one per core]"),
)


def convert_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the argument and the options of ``wanbuild convert``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
