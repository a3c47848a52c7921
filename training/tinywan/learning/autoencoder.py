"""Trains the VAE on crops of drawn videos, through its own causal loop over frames and feature caches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tinywan.drawing import draw
from tinywan.learning.log import Log
from tinywan.learning.models import FRAMES, HEIGHT, WIDTH, autoencoder
from tinywan.learning.optimizer import Optimizer
from tinywan.learning.state import State
from tinywan.scenes import random_scene

RATE = 1e-2


@dataclass(frozen=True)
class Phase:
    """A part of the training.

    Args:
        share: of the steps.
        videos: drawn for each step.
        pieces: cut out of each video.
        frames: of a piece.
        width: of a piece, pixels.
    """

    share: float
    videos: int
    pieces: int
    frames: int
    width: int


PHASES = (Phase(0.35, 4, 4, 1, 64), Phase(0.5, 4, 1, 9, 64), Phase(0.15, 3, 1, 9, WIDTH))
"""Pictures first, of which a step is short; at last whole frames, which the middle's attention is to see."""

STEPS = 3000

KL_WEIGHT = 3e-4
"""Of the divergence per latent value, beside the error per pixel. With an error of b per pixel the evidence's
bound has b/48: 48 values of pixels share one of the latents."""

SQUARE_WEIGHT = 3.0
"""Of the squared error, which draws the colours of large areas near at first."""

EDGE_WEIGHT = 0.5
"""Of the error of differences between neighbouring pixels."""


def crops(rng: np.random.Generator, phase: Phase) -> Tensor:
    """Draws videos and cuts pieces out of them.

    Returns:
        float32 (videos * pieces, 3, frames, HEIGHT, width), -1 to 1.
    """
    pieces = []
    for _ in range(phase.videos):
        video = draw(random_scene(rng), FRAMES, HEIGHT, WIDTH, rng)
        for first in rng.permutation(FRAMES - phase.frames + 1)[: phase.pieces]:
            left = rng.integers(0, WIDTH - phase.width + 1)
            pieces.append(video[first : first + phase.frames, :, left : left + phase.width])
    return pixels(np.stack(pieces))


def pixels(videos: np.ndarray) -> Tensor:
    """Returns uint8 (B, T, H, W, 3) as float32 (B, 3, T, H, W), -1 to 1."""
    return torch.from_numpy(videos).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def train(folder: Path, seed: int, steps: int = STEPS) -> None:
    """Trains the VAE, and saves it with the statistics of its latents in its config.

    Args:
        folder: what ``vae`` and ``log.jsonl`` are written into.
        seed: of weights and videos.
        steps: their number.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = autoencoder()
    for parameter in model.parameters():
        if parameter.ndim == 5:  # 1.4 times as fast
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last_3d)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.995))
    optimizer = Optimizer(model, RATE, steps)
    log = Log(folder / "log.jsonl", "vae", steps)
    state = State(folder / "vae.state", [model, average, optimizer], rng)
    for step in range(state.resumed() + 1, steps + 1):
        videos = crops(rng, phase(step / steps))
        error, divergence = losses(model, videos.contiguous(memory_format=torch.channels_last_3d))
        (error + KL_WEIGHT * divergence).backward()
        optimizer.step()
        average.update_parameters(model)
        log.step(step, error=error.item(), divergence=divergence.item())
        state.save(step)
    save(average.module, folder / "vae", rng)
    state.remove()


def phase(done: float) -> Phase:
    """Returns the phase in which this share of the steps ends."""
    end = 0.0
    for one in PHASES:
        end += one.share
        if done <= end:
            break
    return one


def losses(model: AutoencoderKLWan, videos: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the error per pixel and the divergence per latent value."""
    posterior = model.encode(videos).latent_dist
    error = model.decode(posterior.sample()).sample - videos
    edges = sum(error.diff(dim=axis).abs().mean() for axis in (-1, -2))
    mean, variance = posterior.mean, posterior.var
    divergence = 0.5 * (mean.square() + variance - 1 - variance.log()).mean()
    return error.abs().mean() + SQUARE_WEIGHT * error.square().mean() + EDGE_WEIGHT * edges, divergence


@torch.no_grad()
def save(model: AutoencoderKLWan, folder: Path, rng: np.random.Generator) -> None:
    """Writes the VAE. Latents are scaled by the deviation of what is drawn from the posterior.

    A channel that holds nothing has a mean near 0 and a deviation near 1, and is not blown up.
    """
    posteriors = [model.encode(crops(rng, Phase(1.0, 8, 1, FRAMES, WIDTH))).latent_dist for _ in range(16)]
    drawn = torch.cat([posterior.sample() for posterior in posteriors])
    model.register_to_config(
        latents_mean=[round(value, 5) for value in drawn.mean((0, 2, 3, 4)).tolist()],
        latents_std=[round(value, 5) for value in drawn.std((0, 2, 3, 4)).tolist()],
    )
    model.save_pretrained(folder)
    kept = torch.cat([posterior.mean for posterior in posteriors]).std((0, 2, 3, 4))
    print(json.dumps({"deviation of the latents' means": [round(value, 2) for value in kept.tolist()]}))
