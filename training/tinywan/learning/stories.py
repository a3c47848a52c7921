"""A bank of drawn videos without end as latents, with the scene of every block."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from tinywan.endless import draw_story, random_story
from tinywan.learning.autoencoder import pixels
from tinywan.learning.latents import VAE
from tinywan.scenes import Scene, Thing

BLOCKS = 8
"""Of a video: the window's four, and as many before it."""

CHANGES = 2
"""Of the scene in a video."""

TOGETHER = 4


@dataclass(frozen=True)
class Stories:
    """Drawn videos.

    Args:
        scenes: of every video ``CHANGES`` + 1.
        turns: int (N, BLOCKS), of every block the number of its scene.
        latents: float16 (N, 16, BLOCKS * BLOCK, H, W), scaled as the VAE's config says.
    """

    scenes: list[list[Scene]]
    turns: np.ndarray
    latents: Tensor

    def save(self, folder: Path) -> None:
        """Writes the bank into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        scenes = [[asdict(scene) for scene in some] for some in self.scenes]
        (folder / "scenes.json").write_text(json.dumps(scenes))
        np.save(folder / "turns.npy", self.turns)
        np.save(folder / "latents.npy", self.latents.numpy())

    @classmethod
    def load(cls, folder: Path) -> Stories:
        """Reads a bank."""
        scenes = [
            [Scene((Thing(**one["things"][0]),), one["ground"], one["texture"]) for one in some]
            for some in json.loads((folder / "scenes.json").read_text())
        ]
        latents = torch.from_numpy(np.load(folder / "latents.npy"))
        return cls(scenes, np.load(folder / "turns.npy"), latents)


def make(vae_folder: Path, seed: int, videos: int) -> Stories:
    """Draws videos and encodes each in one run of the VAE."""
    vae, rng = VAE(vae_folder), np.random.default_rng(seed)
    told = [random_story(rng, BLOCKS, CHANGES) for _ in range(videos)]
    latents = []
    for start in tqdm(range(0, videos, TOGETHER), desc="stories", mininterval=10):
        some = told[start : start + TOGETHER]
        drawn = [draw_story([scenes[turn] for turn in turns], rng) for scenes, turns in some]
        latents.append(vae.encode(pixels(np.stack(drawn))))
    return Stories([scenes for scenes, _ in told], np.array([turns for _, turns in told]), torch.cat(latents))
