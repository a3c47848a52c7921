"""``python -m tinywan.learning.tiny_decoder FOLDER``: a tiny decoder of the tiny VAE's latents, like TAEHV's.

It learns to make the frames that the VAE's own decoder makes. Its layers have their numbers in published
files; ``wanbuild convert --tiny-vae FOLDER/tiny_vae.safetensors`` makes an artifact with it.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from tinywan.checkpoint import FOLDER
from tinywan.drawing import FRAMES, HEIGHT, WIDTH, draw
from tinywan.learning.autoencoder import INACCURACY, pixel_error, pixels
from tinywan.learning.course import Course, Plan
from tinywan.learning.latents import VAE
from tinywan.learning.models import CHANNELS
from tinywan.scenes import random_scene
from tinywan.yardstick import psnr
from wanbuild.models.tiny_vae import BLOCKS, LEADING
from wanbuild.models.vae_config import STRIDES

WIDTHS = (48, 24, 16, 16)
"""About a fifth of the published ones: the tiny VAE's are a twelfth of its published ones."""

BATCH = 2


class MemoryBlock(nn.Module):
    """Three convolutions of a frame and the one before it, and a shortcut.

    Args:
        width: channels.
        videos: of a batch; their first frames come first, then their second ones.
    """

    def __init__(self, width: int, videos: int) -> None:
        super().__init__()
        first, last = _conv(2 * width, width), _conv(width, width)
        with torch.no_grad():
            first.weight[:, width:] = 0  # at first every frame is treated by itself
            last.weight *= 0.5
        self.conv = nn.Sequential(first, nn.ReLU(), _conv(width, width), nn.ReLU(), last)
        self._videos = videos

    def forward(self, x: Tensor) -> Tensor:
        """Returns (T * videos, C, H, W) of the same."""
        before = torch.cat([torch.zeros_like(x[: self._videos]), x[: -self._videos]])
        return torch.relu(self.conv(torch.cat([x, before], 1)) + x)


class Grow(nn.Module):
    """More frames of each one, which are the same at first.

    Args:
        width: channels.
        stride: frames that are made of one.
        videos: of a batch, as in ``MemoryBlock``.
    """

    def __init__(self, width: int, stride: int, videos: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, stride * width, 1, bias=False)
        with torch.no_grad():
            self.conv.weight[..., 0, 0] = torch.eye(width).repeat(stride, 1)
        self._stride, self._videos = stride, videos

    def forward(self, x: Tensor) -> Tensor:
        """Returns (stride * T * videos, C, H, W) of (T * videos, C, H, W)."""
        y = self.conv(x).unflatten(1, (self._stride, -1)).unflatten(0, (-1, self._videos))
        return _channels_last(y.transpose(1, 2).flatten(0, 2))


class TinyDecoder(nn.Module):
    """The decoder of a TAEHV of Wan 2.1's latents, https://github.com/madebyollin/taehv.

    Args:
        widths: channels of its three levels, and of the last convolution.
        videos: of a batch.
    """

    def __init__(self, widths: tuple[int, ...] = WIDTHS, videos: int = BATCH) -> None:
        super().__init__()
        layers = [nn.Identity(), _conv(CHANNELS, widths[0]), nn.ReLU()]  # the first one bounds latents
        for level, stride in enumerate(STRIDES):
            width, later = widths[level : level + 2]
            layers += [MemoryBlock(width, videos) for _ in range(BLOCKS)]
            layers += [nn.Upsample(scale_factor=2), Grow(width, stride, videos)]
            layers.append(_conv(width, later, bias=False))
        last = _conv(widths[-1], 3)
        with torch.no_grad():
            last.weight *= 0.1  # frames begin near grey
        nn.init.constant_(last.get_parameter("bias"), 0.5)
        self.decoder = nn.Sequential(*layers, nn.ReLU(), last)
        self._videos = videos

    def forward(self, latents: Tensor) -> Tensor:
        """Returns the frames of latents.

        Args:
            latents: float32 (videos, 16, t, h, w), as a transformer makes them.

        Returns:
            float32 (videos, 3, 4 t - 3, 8 h, 8 w), about -1 to 1.
        """
        x = _channels_last(latents.permute(2, 0, 1, 3, 4).flatten(0, 1))
        x = self.decoder(3 * torch.tanh(x / 3)).unflatten(0, (-1, self._videos))
        return 2 * x.permute(1, 2, 0, 3, 4)[:, :, LEADING:] - 1


def _conv(inputs: int, outputs: int, bias: bool = True) -> nn.Conv2d:
    """A convolution of 3x3 that passes on the variance of what is cut at zero, and nothing of its mean."""
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)
    nn.init.kaiming_normal_(conv.weight)
    with torch.no_grad():
        conv.weight -= conv.weight.mean((1, 2, 3), keepdim=True)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def _channels_last(x: Tensor) -> Tensor:
    """Lays out frames so that convolutions of few channels are 1.4 times as fast."""
    return x.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def decoded(vae: VAE, rng: np.random.Generator, noise: float, held_out: bool = False) -> tuple[Tensor, ...]:
    """Draws a batch of videos, and lets the VAE decode what it makes of them.

    Args:
        vae: encodes and decodes.
        rng: draws scenes; torch draws the noise.
        noise: in the latents, in their deviations.
        held_out: whether scenes combine words as no video of the training does.

    Returns:
        latents (BATCH, 16, t, h, w), the frames that the VAE makes of them, and those that were drawn, both
        (BATCH, 3, FRAMES, HEIGHT, WIDTH) from -1 to 1; all float32.
    """
    scenes = [random_scene(rng, held_out=held_out) for _ in range(BATCH)]
    drawn = pixels(np.stack([draw(scene, FRAMES, HEIGHT, WIDTH, rng) for scene in scenes]))
    latents = vae.encode(drawn).float()
    latents += noise * torch.randn_like(latents)
    return latents, vae.decode(latents), drawn


def train(folder: Path, seed: int, batches: int, steps: int) -> TinyDecoder:
    """Trains the decoder on latents as inaccurate as a transformer's, and writes it.

    Args:
        folder: what ``tiny_vae.safetensors`` and ``log.jsonl`` are written into.
        seed: of weights and videos.
        batches: of videos that are drawn; each is learned from ``steps / batches`` times.
        steps: of training.

    Returns:
        it with the average of its weights.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    vae = VAE(FOLDER / "shared" / "vae")
    drawn = [decoded(vae, rng, INACCURACY)[:2] for _ in tqdm(range(batches), desc="videos", mininterval=10)]
    latents, frames = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    plan = Plan("tiny-decoder", steps, rate=5e-3, memory=0.97)
    model = TinyDecoder()
    course = Course(model, plan, folder / "log.jsonl", rng)
    for step in course.steps():
        chosen = rng.integers(0, len(latents), BATCH)
        error = pixel_error(model(latents[chosen]) - frames[chosen])
        course.learn(step, error, error=error)
    learned: TinyDecoder = course.average()
    tensors = {name: value.half().contiguous() for name, value in learned.state_dict().items()}
    save_file(tensors, folder / "tiny_vae.safetensors", {"format": "pt"})
    course.end()
    return learned


@torch.no_grad()
def distances(tiny: TinyDecoder, seed: int, batches: int) -> dict[str, float]:
    """Returns the PSNR in dB of frames of drawn videos whose scenes no training shows."""
    rng, vae = np.random.default_rng(seed), VAE(FOLDER / "shared" / "vae")
    found: dict[str, list[np.ndarray]] = {"tiny": [], "full": [], "drawn": []}
    for _ in range(batches):
        latents, full, drawn = decoded(vae, rng, 0.0, held_out=True)
        for name, frames in (("tiny", tiny(latents)), ("full", full), ("drawn", drawn)):
            found[name].append(((frames.clamp(-1, 1) + 1) * 127.5).round().byte().numpy())
    videos = {name: np.concatenate(some) for name, some in found.items()}
    pairs = (("tiny", "full"), ("tiny", "drawn"), ("full", "drawn"))
    return {f"{one} to {other}": round(psnr(videos[one], videos[other]), 2) for one, other in pairs}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--batches", default=96, show_default=True, help=f"Of {BATCH} videos, to learn from.")
@click.option("--steps", default=8000, show_default=True, help="Of training.")
@click.option("--seed", default=0, show_default=True)
def main(folder: Path, batches: int, steps: int, seed: int) -> None:
    """Trains a tiny decoder, writes it into FOLDER, and says its distances in dB.

    8 000 steps take a core about 20 minutes.
    """
    torch.set_num_threads(1)  # convolutions of so few channels are hardly faster by a second one
    folder.mkdir(parents=True, exist_ok=True)
    tiny = train(folder, seed, batches, steps)
    click.echo(json.dumps(distances(tiny, seed + 10_000, 16)))


if __name__ == "__main__":
    main()
