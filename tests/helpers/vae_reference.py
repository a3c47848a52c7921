"""diffusers' VAE with random weights, as the judge of the VAE's parity tests."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import nn

from helpers.compiling import fast_jit
from helpers.naive import load_params
from wanbuild.config import parse_config
from wanbuild.mapping.vae_rules import VAE_RULES
from wanbuild.models.params import bind
from wanbuild.models.vae import WanVAE
from wanbuild.models.vae_config import VAEConfig

TOLERANCE = 1e-5
"""Float32 noise: 1e-6 to 2e-6 of the largest value was measured, at these sizes and at the published one."""

ALL = 1000
"""A chunk that holds every frame."""


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


def relative_error(found: jax.Array | np.ndarray, expected: np.ndarray) -> float:
    """The largest difference in units of the largest expected value."""
    assert found.shape == expected.shape
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())


@dataclass(frozen=True, eq=False)
class Pair:
    """One VAE with one set of random weights in both implementations."""

    reference: AutoencoderKLWan
    config: VAEConfig
    module: WanVAE
    params: dict[str, Any]

    def decode(self, latents: np.ndarray, chunk: int, **options: Any) -> jax.Array:
        """``WanVAE.decode``, compiled once per chunk, options and shape."""
        return program(self.module, "decode", chunk, **options)(self.params, latents)

    def encode(self, video: np.ndarray, chunk: int, **options: Any) -> tuple[jax.Array, jax.Array]:
        """``WanVAE.encode``, compiled once per chunk, options and shape."""
        return program(self.module, "encode", chunk, **options)(self.params, video)

    def temporary_bytes(self, method: str, shape: tuple[int, ...]) -> int:
        """Memory beside inputs and outputs, in pieces of two latent frames.

        Decoding makes one byte of each value, piece by piece.
        """
        options = {"finish": _to_bytes} if method == "decode" else {}
        compiled = (
            program(self.module, method, 2, **options)
            .lower(self.params, jax.ShapeDtypeStruct(shape, np.float32))
            .compile()
        )
        return int(compiled.memory_analysis().temp_size_in_bytes)

    def draw_latents(self, frames: int, size: tuple[int, int] = (3, 5), batch: int = 1) -> np.ndarray:
        """Standard normal (B, z, frames, h, w)."""
        shape = (batch, self.config.z_dim, frames, *size)
        return np.random.default_rng(frames).standard_normal(shape, dtype=np.float32)

    def draw_video(self, latent_frames: int, size: tuple[int, int] = (3, 5), batch: int = 1) -> np.ndarray:
        """Uniform (B, T, H, W, 3) in [-1, 1], for this many latent frames of this size."""
        height, width = (self.config.spatial * cells for cells in size)
        shape = (batch, 4 * latent_frames - 3, height, width, 3)
        return np.random.default_rng(latent_frames).uniform(-1, 1, shape).astype(np.float32)


def _to_bytes(video: jax.Array) -> jax.Array:
    return video.astype("int8")


@functools.cache
def pair(**config: Any) -> Pair:
    """A pair of this configuration of AutoencoderKLWan, with tuples for its lists."""
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()}
    reference = reference_vae(0, **lists)
    parsed = parse_config(VAEConfig, json.loads(reference.to_json_string()), "config.json")
    module = WanVAE(parsed)
    return Pair(reference, parsed, module, load_params(state_arrays(reference), VAE_RULES, module))


@functools.cache
def program(module: WanVAE, method: str, chunk: int, **options: Any) -> Callable[..., Any]:
    """A jitted function of parameters and input."""
    return fast_jit(lambda params, x: getattr(bind(module, params), method)(x, chunk, **options))


@contextmanager
def tiled(model: Pair, side: int) -> Iterator[None]:
    """The reference computes in tiles of this side, as far apart as diffusers' own are."""
    step = side * 3 // 4
    model.reference.enable_tiling(side, side, step, step)
    try:
        yield
    finally:
        model.reference.disable_tiling()
