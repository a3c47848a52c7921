"""diffusers' VAE with random weights, as the judge of the VAE's parity tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import nn


def randomize(module: nn.Module, seed: int) -> None:
    """Draws every parameter, norm scales and biases too, so that no mistake is hidden by ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("gamma"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)


def reference_vae(seed: int, **config: Any) -> AutoencoderKLWan:
    """A reference in float32 whose decoded values are spread over [-1, 1] with little clipping."""
    vae = AutoencoderKLWan(**config).eval()
    randomize(vae, seed)
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(0.3)
    return vae


def state_arrays(module: nn.Module) -> dict[str, np.ndarray]:
    """Its state dict as NumPy arrays."""
    return {key: value.numpy() for key, value in module.state_dict().items()}


def decoded(vae: AutoencoderKLWan, latents: np.ndarray) -> np.ndarray:
    """(B, z, t, h, w) to (B, T, H, W, 3)."""
    with torch.no_grad():
        return vae.decode(torch.from_numpy(latents)).sample.permute(0, 2, 3, 4, 1).numpy()


def encoded(vae: AutoencoderKLWan, video: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(B, T, H, W, 3) to mean and log variance, (B, z, t, h, w)."""
    with torch.no_grad():
        moments = vae.encode(torch.from_numpy(video).permute(0, 4, 1, 2, 3)).latent_dist
    return moments.mean.numpy(), moments.logvar.numpy()
