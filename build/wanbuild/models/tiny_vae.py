"""A tiny decoder of Wan's latents: the decoder of TAEHV, https://github.com/madebyollin/taehv.

Nine blocks see a frame and the one before it; three levels double height and width, and the last two of them
time. Activations are (B, T, H, W, C). Frames pass in pieces along time, and each block carries its last input
from piece to piece; the size of the pieces does not change the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from wanbuild.models import convolution
from wanbuild.models.layers import Linear
from wanbuild.models.params import param
from wanbuild.models.vae_blocks import Conv2d
from wanbuild.models.vae_config import STRIDES, TinyVAEConfig

BLOCKS = 3
"""Blocks of each level."""

LEADING = 3
"""Frames that are made in front of the first one, and left out."""


class MemoryBlock(nnx.Module):
    """Three convolutions of a frame and the one before it, and a shortcut."""

    def __init__(self, dim: int, dtype: Any) -> None:
        self.conv = nnx.List([Conv2d(inputs, dim, dtype) for inputs in (2 * dim, dim, dim)])

    def __call__(self, x: jax.Array, past: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (B, T, H, W, C) of the same, and its last frame; ``past`` is the frame before the first."""
        before = jnp.concatenate([past, x[:, :-1]], 1)
        y = jnp.concatenate([x, before], -1)
        for number, conv in enumerate(self.conv):
            y = _convolved(y, conv)
            y = jax.nn.relu(y if number < len(self.conv) - 1 else y + x)
        return y, x[:, -1:]


class Level(nnx.Module):
    """Blocks, more frames, and twice the height and width with other channels.

    Its weights could make ``stored`` frames of one; it makes ``stride``.
    """

    def __init__(self, in_dim: int, out_dim: int, stored: int, stride: int, dtype: Any) -> None:
        self.blocks = nnx.List([MemoryBlock(in_dim, dtype) for _ in range(BLOCKS)])
        self.grow = Linear(in_dim, stored * in_dim, dtype, (None, None), bias=False)
        self.upsample = param((3, 3, in_dim, out_dim), dtype, (None,) * 4)
        self.stride = stride

    def __call__(
        self, x: jax.Array, past: list[jax.Array], algorithm: convolution.Algorithm
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Returns (B, stride T, 2 H, 2 W, O) of (B, T, H, W, C), and the last input of each block."""
        last = []
        for block, before in zip(self.blocks, past, strict=True):
            x, kept = block(x, before)
            last.append(kept)
        # A product of channels is the same before the upsampling, for a quarter of the pixels.
        B, T, H, W, C = x.shape
        y = self.grow(x)[..., -self.stride * C :].reshape(B, T, H, W, self.stride, C)
        y = jnp.moveaxis(y, 4, 2).reshape(B, T * self.stride, H, W, C)
        return convolution.upsample_conv3x3(y, self.upsample[...], algorithm), last


class TinyVAE(nnx.Module):
    """The decoder, with abstract parameters until ``bind``.

    ``config`` is derived from the checkpoint's shapes.
    """

    def __init__(self, config: TinyVAEConfig, param_dtype: Any = jnp.float32) -> None:
        widths = config.widths
        self.conv_in = Conv2d(config.latent_channels, widths[0], param_dtype)
        self.levels = nnx.List(
            [
                Level(widths[i], widths[i + 1], stored, stride, param_dtype)
                for i, (stored, stride) in enumerate(zip(config.stored_frames, STRIDES, strict=True))
            ]
        )
        self.conv_out = Conv2d(widths[-1], 3 * config.patch_size**2, param_dtype)
        self.patch_size = config.patch_size

    def decode(
        self,
        latents: jax.Array,
        chunk: int,
        *,
        dtype: Any = jnp.float32,
        algorithm: convolution.Algorithm = "direct",
        finish: Callable[[jax.Array], jax.Array] | None = None,
    ) -> jax.Array:
        """Decodes latents to a video.

        The video is (B, 4 (t - 1) + 1, s h, s w, 3), float32 in [0, 1] unless ``finish`` converts it.

        Args:
            latents: (B, z, t, h, w), normalised.
            chunk: latent frames per piece; less than one raises ValueError.
            dtype: dtype of the activations.
            algorithm: the form of the convolutions: ``winograd`` for the CPU, ``direct`` elsewhere.
            finish: applied to each piece of the video, (B, T, s h, s w, 3) float32 in [0, 1]; it must work
                frame by frame.
        """
        if chunk < 1:
            raise ValueError(f"a piece of {chunk} frames")
        x = jnp.moveaxis(latents, 1, -1)
        x = (jnp.tanh(x / 3) * 3).astype(dtype)  # it bounds latents softly
        frames = x.shape[1]
        count = -(-frames // chunk)
        size = -(-frames // count)  # pieces of equal length
        x = jnp.pad(x, ((0, 0), (0, count * size - frames), (0, 0), (0, 0), (0, 0)))
        pieces = jnp.moveaxis(x.reshape(len(x), count, size, *x.shape[2:]), 1, 0)

        def piece(past: list[list[jax.Array]], x: jax.Array) -> tuple[list[list[jax.Array]], jax.Array]:
            y, last = self._piece(x, past, algorithm)
            return last, finish(y) if finish else y

        _, video = lax.scan(piece, self._blank(pieces[0]), pieces)
        video = jnp.moveaxis(video, 0, 1)
        video = video.reshape(video.shape[0], -1, *video.shape[3:])
        return video[:, LEADING : LEADING + 4 * (frames - 1) + 1]

    def _piece(
        self, x: jax.Array, past: list[list[jax.Array]], algorithm: convolution.Algorithm
    ) -> tuple[jax.Array, list[list[jax.Array]]]:
        """Returns the frames of a piece of latents (B, T, h, w, z), and each block's last input."""
        x, last = jax.nn.relu(_convolved(x, self.conv_in)), []
        for level, before in zip(self.levels, past, strict=True):
            x, kept = level(x, before, algorithm)
            last.append(kept)
        y = _convolved(jax.nn.relu(x), self.conv_out)
        y = jnp.clip(_from_patches(y, self.patch_size).astype(jnp.float32), 0, 1)
        return y, last

    def _blank(self, x: jax.Array) -> list[list[jax.Array]]:
        """Returns each block's substitute for the frame before the first one."""
        B, _, H, W, _ = x.shape
        sizes = [(2**number * H, 2**number * W) for number in range(len(self.levels))]
        return [
            [jnp.zeros((B, 1, *size, level.upsample.shape[-2]), x.dtype) for _ in level.blocks]
            for level, size in zip(self.levels, sizes, strict=True)
        ]


def _convolved(x: jax.Array, conv: Conv2d) -> jax.Array:
    """3x3 convolution of every frame, with its bias."""
    y = convolution.conv3x3(x, conv.weight[...])
    return y + conv.bias[...].astype(y.dtype)


def _from_patches(x: jax.Array, size: int) -> jax.Array:
    """(B, T, H, W, C size²) to (B, T, H size, W size, C), rows of a patch first; torch's pixel_shuffle."""
    B, T, H, W, C = x.shape
    x = x.reshape(B, T, H, W, C // size**2, size, size)
    return x.transpose(0, 1, 2, 5, 3, 6, 4).reshape(B, T, H * size, W * size, -1)
