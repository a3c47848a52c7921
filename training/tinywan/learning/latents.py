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

from tinywan.drawing import draw
from tinywan.learning.autoencoder import pixels
from tinywan.learning.models import FRAMES, HEIGHT, WIDTH
from tinywan.scenes import Scene, Thing, random_scene

VIDEOS = 8000
TOGETHER = 8


@dataclass(frozen=True)
class Bank:
    """Drawn videos.

    Args:
        scenes: what each shows.
        latents: float16 (N, 16, T, H, W), scaled as the VAE's config says.
        conditions: as ``latents``, of the first frame and then grey; what image to video is given.
        first_frames: uint8 (N, HEIGHT, WIDTH, 3).
    """

    scenes: list[Scene]
    latents: Tensor
    conditions: Tensor
    first_frames: np.ndarray

    def save(self, folder: Path) -> None:
        """Writes the bank into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "scenes.json").write_text(json.dumps([asdict(scene) for scene in self.scenes]))
        for name in ("latents", "conditions"):
            np.save(folder / f"{name}.npy", getattr(self, name).numpy())
        np.save(folder / "first_frames.npy", self.first_frames)

    @classmethod
    def load(cls, folder: Path) -> Bank:
        """Reads a bank."""
        scenes = [
            Scene(tuple(Thing(**thing) for thing in scene["things"]), scene["ground"], scene["texture"])
            for scene in json.loads((folder / "scenes.json").read_text())
        ]
        latents, conditions, frames = (
            np.load(folder / f"{name}.npy") for name in ("latents", "conditions", "first_frames")
        )
        return cls(scenes, torch.from_numpy(latents), torch.from_numpy(conditions), frames)


def scaled(model: AutoencoderKLWan, videos: Tensor) -> Tensor:
    """Returns the latents of videos, float32 (B, 16, T, H, W), as diffusers' pipelines scale them."""
    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (model.config.latents_mean, model.config.latents_std)
    )
    return (model.encode(videos).latent_dist.mode() - mean) / deviation


@torch.no_grad()
def make(folder: Path, seed: int, videos: int = VIDEOS) -> Bank:
    """Draws videos and encodes them with the VAE of ``folder``. None shows what is held out."""
    model = AutoencoderKLWan.from_pretrained(folder / "vae", torch_dtype=torch.float32)
    rng = np.random.default_rng(seed)
    scenes: list[Scene] = []
    latents, conditions, first_frames = [], [], []
    for _ in tqdm(range(videos // TOGETHER), desc="latents", mininterval=10):
        some = [random_scene(rng) for _ in range(TOGETHER)]
        drawn = np.stack([draw(scene, FRAMES, HEIGHT, WIDTH, rng) for scene in some])
        frames = pixels(drawn)
        alone = torch.cat([frames[:, :, :1], torch.zeros_like(frames[:, :, 1:])], 2)
        scenes += some
        latents.append(scaled(model, frames).half())
        conditions.append(scaled(model, alone).half())
        first_frames.append(drawn[:, 0])
    bank = Bank(scenes, torch.cat(latents), torch.cat(conditions), np.concatenate(first_frames))
    bank.save(folder / "bank")
    return bank
