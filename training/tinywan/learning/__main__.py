"""``python -m tinywan.learning FOLDER``: trains everything, or the stages that are named.

Read this file first: ``STAGES`` is the whole training in order. The VAE learns to encode drawn videos, its
decoder is polished, and a bank of latents is made; then each transformer begins with the one before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import click
import torch

from tinywan.learning import autoencoder, export, latents, stages

STAGES: Mapping[str, Callable[[Path, int], object]] = {
    "vae": autoencoder.train,
    "polish": autoencoder.polish,
    "latents": latents.make,
    "draft": stages.train_draft,
    "text": stages.train_text,
    "experts": stages.train_experts,
    "image": stages.train_image,
}
"""In their order: each needs those before it."""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--stage", "chosen", type=click.Choice(list(STAGES)), multiple=True, help="Default: all.")
@click.option("--seed", default=0, show_default=True)
@click.option("--checkpoints", "target", type=click.Path(path_type=Path), help="Write them here at the end.")
def main(folder: Path, chosen: tuple[str, ...], seed: int, target: Path | None) -> None:
    """Trains the tiny checkpoints in FOLDER, which takes two cores about two hours."""
    torch.set_num_threads(2)  # another number gives other sums, and so other weights
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, stage) in enumerate(STAGES.items()):
        if name in chosen or not chosen:
            begun = time.monotonic()
            stage(folder, seed + number)
            click.echo(f"{name}: {(time.monotonic() - begun) / 60:.1f} minutes")
    if target is not None:
        export.write(folder, target)


if __name__ == "__main__":
    main()
