"""Flow matching: a transformer learns the velocity from a video's latents to noise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from transformers import CLIPVisionModel

from tinywan.captions import caption
from tinywan.learning.course import Course, Plan
from tinywan.learning.latents import Bank
from tinywan.learning.text import Captions, shorten

DROPPED = 0.1
"""The share of captions that are left out, for guidance."""


@dataclass(frozen=True)
class Noise:
    """Which noise a transformer is to take away.

    Args:
        shift: of the scheduler: more of it is learned at high noise.
        lowest: least sigma.
        highest: greatest sigma, 1 for pure noise.
    """

    shift: float
    lowest: float = 0.0
    highest: float = 1.0

    def draw(self, count: int) -> Tensor:
        """Draws sigmas (count,), spread evenly over the scheduler's steps."""
        low, high = (sigma / (self.shift - (self.shift - 1) * sigma) for sigma in (self.lowest, self.highest))
        even = low + (high - low) * (torch.arange(count) + torch.rand(count)) / count
        return self.shift * even / (1 + (self.shift - 1) * even)


@dataclass(frozen=True)
class Lesson:
    """What a transformer learns.

    Args:
        plan: how long and how fast.
        noise: which it learns to take away.
        saved: the folders of what was trained: the transformer, and then the encoder if one learns with it.
        batch: videos of a step.
        compiled: whether torch compiles the transformer: half as fast again, but it needs a C++ compiler.
    """

    plan: Plan
    noise: Noise
    saved: tuple[str, ...]
    batch: int = 32
    compiled: bool = True


@dataclass(frozen=True)
class Images:
    """First frames of a bank's videos, for image to video.

    Args:
        encoder: CLIP, which learns.
        pixels: float32 (N, 3, 32, 32), prepared for it.
        latents: float16 (N, 16, T, H, W), as conditions.
    """

    encoder: CLIPVisionModel
    pixels: Tensor
    latents: Tensor

    def embed(self, chosen: np.ndarray) -> Tensor:
        """Returns float32 (B, 17, width), of the last layer but one as Wan's pipelines do."""
        states = self.encoder(self.pixels[chosen], output_hidden_states=True).hidden_states
        return torch.as_tensor(states[-2])


def train(
    model: WanTransformer3DModel,
    captions: Captions,
    bank: Bank,
    lesson: Lesson,
    folder: Path,
    seed: int,
    images: Images | None = None,
) -> None:
    """Trains a transformer, and those encoders whose parameters require gradients; saves their averages.

    Args:
        model: is changed.
        captions: embeds texts.
        bank: videos.
        lesson: what is learned.
        folder: of what is saved, and of the log of losses.
        seed: of everything that is drawn.
        images: of the bank; None for text to video.

    A training that was interrupted goes on from its last state, in the same folder, as if it had not been.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    shorten(model)
    encoders = [captions.encoder, *([images.encoder] if images else [])]
    learning = [encoder for encoder in encoders if next(encoder.parameters()).requires_grad]
    course = Course(nn.ModuleList([model, *learning]), lesson.plan, folder / "log.jsonl", rng)
    velocity = torch.compile(model, dynamic=False) if lesson.compiled else model
    for step in course.steps():
        chosen = rng.integers(0, len(bank.scenes), lesson.batch)
        sigma = lesson.noise.draw(lesson.batch)[torch.randperm(lesson.batch)]
        clean = bank.latents[chosen].float()
        noise = torch.randn_like(clean)
        share = sigma.view(-1, 1, 1, 1, 1)
        given = (1 - share) * clean + share * noise
        image = None
        if images is not None:
            given = torch.cat([given, condition(images.latents[chosen].float())], 1)
            image = images.embed(chosen)
        texts = ["" if rng.random() < DROPPED else caption(bank.scenes[i], rng) for i in chosen]
        predicted = velocity(given, 1000 * sigma, captions(texts), image, return_dict=False)[0]
        course.learn(step, mse_loss(predicted, noise - clean))
    for part, name in zip(course.average().children(), lesson.saved, strict=True):
        part.save_pretrained(folder / name)
    course.end()


def condition(latents: Tensor) -> Tensor:
    """Returns (B, 20, T, H, W): four channels of mask, 1 for the first frame, and the condition's latents."""
    mask = torch.zeros_like(latents[:, :4])
    mask[:, :, 0] = 1
    return torch.cat([mask, latents], 1)
