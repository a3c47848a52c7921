"""Trains the VAE on crops of drawn videos, through its own causal loop over frames and feature caches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from tinywan.drawing import FRAMES, HEIGHT, WIDTH, draw
from tinywan.learning.course import Course, Plan
from tinywan.learning.models import autoencoder
from tinywan.scenes import random_scene

PLAN = Plan("vae", steps=2400, rate=1e-2, memory=0.995)
POLISH = Plan("polish", steps=800, rate=2e-3, memory=0.99)

INACCURACY = 0.1
"""Of a transformer's latents, in their deviations; the decoder learns to bear it."""


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

KL_WEIGHT = 3e-4
"""Of the divergence per latent value, relative to the error per pixel. With an error of b per pixel the
evidence's bound has b/48: 48 values of pixels share one of the latents."""

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


def train(folder: Path, seed: int) -> None:
    """Trains the VAE, and saves it with the statistics of its latents in its config.

    Args:
        folder: what ``vae_draft`` and ``log.jsonl`` are written into.
        seed: of weights and videos.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = _channels_last(autoencoder())
    course = Course(model, PLAN, folder / "log.jsonl", rng)
    for step in course.steps():
        videos = crops(rng, phase(step / PLAN.steps))
        error, divergence = losses(model, videos.contiguous(memory_format=torch.channels_last_3d))
        course.learn(step, error + KL_WEIGHT * divergence, error=error, divergence=divergence)
    save(course.average(), folder / "vae_draft", rng)
    course.end()


def polish(folder: Path, seed: int) -> None:
    """Goes on with the decoder, given latents as inaccurate as a transformer's. Latents stay what they are.

    Args:
        folder: what ``vae`` and ``log.jsonl`` are written into.
        seed: of videos.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = _channels_last(AutoencoderKLWan.from_pretrained(folder / "vae_draft", torch_dtype=torch.float32))
    for part in (model.encoder, model.quant_conv):
        part.requires_grad_(False)
    deviation = torch.tensor(model.config.latents_std).view(1, -1, 1, 1, 1)
    course = Course(model, POLISH, folder / "log.jsonl", rng)
    for step in course.steps():
        videos = crops(rng, PHASES[-1]).contiguous(memory_format=torch.channels_last_3d)
        with torch.no_grad():
            latents = model.encode(videos).latent_dist.mode()
        latents = latents + INACCURACY * deviation * torch.randn_like(latents)
        error = pixel_error(model.decode(latents).sample - videos)
        course.learn(step, error, error=error)
    course.average().save_pretrained(folder / "vae")
    course.end()


def _channels_last(model: AutoencoderKLWan) -> AutoencoderKLWan:
    """Lays out its convolutions so that they are 1.4 times as fast."""
    for parameter in model.parameters():
        if parameter.ndim == 5:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last_3d)
    return model


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
    mean, variance = posterior.mean, posterior.var
    divergence = 0.5 * (mean.square() + variance - 1 - variance.log()).mean()
    return pixel_error(model.decode(posterior.sample()).sample - videos), divergence


def pixel_error(error: Tensor) -> Tensor:
    """Returns what a difference of frames (B, 3, T, H, W), -1 to 1, counts: scalar."""
    edges = sum(error.diff(dim=axis).abs().mean() for axis in (-1, -2))
    return error.abs().mean() + SQUARE_WEIGHT * error.square().mean() + EDGE_WEIGHT * edges


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
