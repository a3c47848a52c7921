"""A bank of drawn videos as latents: made once, learned from by every transformer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor
from tqdm import tqdm

from tinywan.drawing import FRAMES, HEIGHT, WIDTH, draw
from tinywan.learning.autoencoder import pixels
from tinywan.scenes import Scene, Thing, random_scene

VIDEOS = 6000
TOGETHER = 8

NAMELESS = 0.2
"""The share of things that move in a way without a name."""


@dataclass(frozen=True)
class Bank:
    """Drawn videos.

    Args:
        scenes: what each shows.
        latents: float16 (N, 16, T, H, W), scaled as the VAE's config says.
        first_frames: uint8 (N, HEIGHT, WIDTH, 3).
    """

    scenes: list[Scene]
    latents: Tensor
    first_frames: np.ndarray

    def save(self, folder: Path) -> None:
        """Writes the bank into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "scenes.json").write_text(json.dumps([asdict(scene) for scene in self.scenes]))
        np.save(folder / "latents.npy", self.latents.numpy())
        np.save(folder / "first_frames.npy", self.first_frames)

    @classmethod
    def load(cls, folder: Path) -> Bank:
        """Reads a bank."""
        scenes = [
            Scene(tuple(Thing(**thing) for thing in scene["things"]), scene["ground"], scene["texture"])
            for scene in json.loads((folder / "scenes.json").read_text())
        ]
        latents = torch.from_numpy(np.load(folder / "latents.npy"))
        return cls(scenes, latents, np.load(folder / "first_frames.npy"))


class VAE:
    """The trained VAE.

    Args:
        folder: of the VAE.
    """

    def __init__(self, folder: Path) -> None:
        self._model = AutoencoderKLWan.from_pretrained(folder, torch_dtype=torch.float32)
        config = self._model.config
        self._mean, self._deviation = (
            torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std)
        )

    @torch.no_grad()
    def encode(self, videos: Tensor) -> Tensor:
        """Returns the latents of videos, float16 (B, 16, T, H, W), scaled as diffusers' pipelines do."""
        latents = self._model.encode(videos).latent_dist.mode()
        return torch.as_tensor((latents - self._mean) / self._deviation).half()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Returns the frames of latents, float32 (B, 3, F, H, W), -1 to 1."""
        return torch.as_tensor(self._model.decode(latents * self._deviation + self._mean).sample)


def make(folder: Path, seed: int, videos: int = VIDEOS) -> Bank:
    """Draws videos and encodes them with the VAE of ``folder``. None shows what is held out."""
    vae = VAE(folder / "vae")
    rng = np.random.default_rng(seed)
    scenes: list[Scene] = []
    latents, first_frames = [], []
    for _ in tqdm(range(videos // TOGETHER), desc="latents", mininterval=10):
        some = [random_scene(rng, nameless=NAMELESS) for _ in range(TOGETHER)]
        drawn = np.stack([draw(scene, FRAMES, HEIGHT, WIDTH, rng) for scene in some])
        scenes += some
        latents.append(vae.encode(pixels(drawn)))
        first_frames.append(drawn[:, 0])
    bank = Bank(scenes, torch.cat(latents), np.concatenate(first_frames))
    bank.save(folder / "bank")
    return bank


def conditions(folder: Path, first_frames: np.ndarray) -> Tensor:
    """Encodes what image to video is given: each first frame (N, HEIGHT, WIDTH, 3), and then grey ones.

    Returns:
        float16 (N, 16, T, H, W); of the later of two runs, what the earlier has saved.
    """
    file = folder / "bank" / "conditions.npy"
    if not file.exists():
        vae = VAE(folder / "vae")
        made = []
        for start in tqdm(range(0, len(first_frames), TOGETHER), desc="conditions", mininterval=10):
            first = pixels(first_frames[start : start + TOGETHER, None])
            grey = torch.zeros_like(first).repeat(1, 1, FRAMES - 1, 1, 1)
            made.append(vae.encode(torch.cat([first, grey], 2)))
        np.save(file, torch.cat(made).numpy())
    return torch.from_numpy(np.load(file))
