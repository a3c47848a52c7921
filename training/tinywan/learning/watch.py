"""``python -m tinywan.learning.watch CHECKPOINT``: how good a causal model's videos are, block by block.

One set of videos goes on with its caption for many blocks: a drift would show. In another the caption changes
again and again: a model that does not heed it would show.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from transformers import UMT5EncoderModel

from tinywan.captions import caption
from tinywan.drawing import HEIGHT, WIDTH
from tinywan.endless import BLOCK, GOING_ON, changed, judge_block, judge_blocks, random_story
from tinywan.judge import Verdict
from tinywan.learning.causal import Sampler
from tinywan.learning.latents import VAE
from tinywan.learning.models import CHANNELS
from tinywan.learning.text import Captions
from tinywan.scenes import Scene

EVERY = 5
"""Blocks between two changes of a caption."""

JUDGED, LEADING = 5, 2
"""Blocks of a long video that are judged at each place, and those that are decoded before them."""


class Watched:
    """A causal model with everything that videos need.

    Args:
        checkpoint: its folder, in the published layout.
        transformer: the folder of another transformer, such as one that is still in training.
    """

    def __init__(self, checkpoint: Path, transformer: Path | None = None) -> None:
        folder = transformer or checkpoint / "transformer"
        encoder = UMT5EncoderModel.from_pretrained(checkpoint / "text_encoder", torch_dtype=torch.float32)
        self._model = WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.float32)
        self._captions = Captions(checkpoint / "tokenizer", encoder)
        self._vae = VAE(checkpoint / "vae")

    @torch.no_grad()
    def latents(self, texts: Sequence[Sequence[str]], seed: int) -> Tensor:
        """Makes videos together.

        Args:
            texts: of every video the captions of its blocks.
            seed: of the noise.

        Returns:
            float32 (B, 16, T, H, W).
        """
        shape = (len(texts), CHANNELS, BLOCK, HEIGHT // 8, WIDTH // 8)
        sampler = Sampler(self._model, shape, seed)
        return torch.cat([sampler.block(self._captions(list(now))) for now in zip(*texts, strict=True)], 2)

    def frames(self, latents: Tensor) -> np.ndarray:
        """Returns the frames of latents (16, T, H, W), uint8 (F, HEIGHT, WIDTH, 3)."""
        frames = self._vae.decode(latents[None])[0].clamp(-1, 1)
        return np.asarray(((frames + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy())


def going_on(watched: Watched, videos: int, blocks: int, seed: int) -> dict[str, dict[str, float]]:
    """Returns at four places of videos with one caption the score, and the share of blocks without flaws."""
    rng = np.random.default_rng(seed)
    texts = []
    for number in range(videos):
        (scene, *_), _ = random_story(rng, 1, 0)
        thing = replace(scene.things[0], motion=GOING_ON[number % len(GOING_ON)])
        texts.append(caption(replace(scene, things=(thing,))))
    made = watched.latents([[text] * blocks for text in texts], seed)
    found = {}
    for begin in np.linspace(LEADING + 1, blocks - JUDGED, 4).astype(int):
        verdicts = []
        for latents, text in zip(made, texts, strict=True):
            piece = latents[:, BLOCK * (begin - LEADING) : BLOCK * (begin + JUDGED)]
            frames = watched.frames(piece)[-4 * BLOCK * JUDGED :]
            verdicts += [judge_block(one, text) for one in np.split(frames, JUDGED)]
        clean = float(np.mean([not verdict.badly_drawn for verdict in verdicts]))
        found[f"block {begin}"] = {"score": _score(verdicts), "without flaws": round(clean, 3)}
    return found


def changing(watched: Watched, videos: int, changes: int, seed: int) -> dict[str, float]:
    """Returns the scores of blocks whose caption is new, of those after them, and of those before the next.

    A thing that is to grow, and did so before, is not judged: it may have grown.
    """
    rng = np.random.default_rng(seed)
    stories = [_story(rng, changes) for _ in range(videos)]
    texts = [[caption(scene) for scene in scenes for _ in range(EVERY)] for scenes in stories]
    places = {"changed": 0, "after it": 1, "before the next": EVERY - 1}
    found: dict[str, list[Verdict]] = {name: [] for name in places}
    for latents, told, scenes in zip(watched.latents(texts, seed), texts, stories, strict=True):
        verdicts = list(judge_blocks(watched.frames(latents), told))
        for number, (before, now) in enumerate(itertools.pairwise(scenes), 1):
            for name, place in places.items():
                if _motion(now) in GOING_ON or (_motion(now) != _motion(before) and not place):
                    found[name].append(verdicts[number * EVERY + place])
    return {name: _score(some) for name, some in found.items()}


def _story(rng: np.random.Generator, changes: int) -> list[Scene]:
    """Draws a scene and what it changes to, again and again."""
    scenes = random_story(rng, 1, 0)[0]
    for _ in range(changes):
        scenes.append(changed(scenes[-1], rng))
    return scenes


def _motion(scene: Scene) -> str | None:
    return scene.things[0].motion


def _score(verdicts: Sequence[Verdict]) -> float:
    return round(float(np.mean([verdict.score for verdict in verdicts])), 3)


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--transformer", type=click.Path(exists=True, path_type=Path), help="Another one.")
@click.option("--videos", default=5, show_default=True, help="With one caption each.")
@click.option("--blocks", default=200, show_default=True, help="Of each.")
@click.option("--changing", "others", default=8, show_default=True, help="Videos whose captions change.")
@click.option("--changes", default=6, show_default=True, help="In each.")
@click.option("--seed", default=0, show_default=True)
def main(
    checkpoint: Path, transformer: Path | None, videos: int, blocks: int, others: int, changes: int, seed: int
) -> None:
    """Scores the causal model of CHECKPOINT."""
    torch.set_num_threads(1)
    watched = Watched(checkpoint, transformer)
    if videos:
        click.echo(json.dumps(going_on(watched, videos, blocks, seed)))
    if others:
        click.echo(json.dumps(changing(watched, others, changes, seed + 1)))


if __name__ == "__main__":
    main()
