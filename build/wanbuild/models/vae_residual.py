"""The additions of the Wan 2.2 VAE to the 2.1 one: shortcuts around whole levels, and patches of pixels.

A shortcut has no parameters: it averages or repeats values, and moves them between channels and pixels in the
reference's order (diffusers' ``autoencoder_kl_wan``: AvgDown3D, DupUp3D, patchify).

Activations are (B, T, H, W, C).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from wanbuild.models.vae_blocks import Downsample, ResidualBlock, Stream, UpBlock


def patchify(video: jax.Array, size: int) -> jax.Array:
    """Moves each square of size by size pixels into channels, ordered (colour, column, row), row fastest.

    (B, T, H, W, C), H and W multiples of size, becomes (B, T, H / size, W / size, C · size²).
    """
    B, T, H, W, C = video.shape
    x = video.reshape(B, T, H // size, size, W // size, size, C)
    return x.transpose(0, 1, 2, 4, 6, 5, 3).reshape(B, T, H // size, W // size, -1)


def unpatchify(x: jax.Array, size: int) -> jax.Array:
    """The inverse of ``patchify``: (B, T, H, W, C · size²) to (B, T, H · size, W · size, C)."""
    B, T, H, W, C = x.shape
    x = x.reshape(B, T, H, W, C // size**2, size, size)
    return x.transpose(0, 1, 2, 6, 3, 5, 4).reshape(B, T, H * size, W * size, -1)


def average_down(x: jax.Array, out_dim: int, time: int, space: int) -> jax.Array:
    """Moves pixels into channels, then averages neighbouring channels; diffusers' AvgDown3D.

    A group is ``time`` frames and ``space`` pixels along height and along width: (B, T, H, W, C) becomes (B,
    ceil(T / time), H / space, W / space, out_dim), out_dim a divisor of C · time · space². An incomplete
    group of frames, such as the first frame, gets zeros in front.
    """
    x = jnp.pad(x, ((0, 0), (-x.shape[1] % time, 0), (0, 0), (0, 0), (0, 0)))
    B, T, H, W, C = x.shape
    x = x.reshape(B, T // time, time, H // space, space, W // space, space, C)
    x = x.transpose(0, 1, 3, 5, 7, 2, 4, 6)  # C, time, height, width: neighbours in this order are averaged
    return jnp.mean(x.reshape(*x.shape[:4], out_dim, -1), -1, dtype=jnp.float32).astype(x.dtype)


def duplicate_up(x: jax.Array, out_dim: int, time: int, space: int) -> jax.Array:
    """Repeats each channel, then moves channels into pixels; diffusers' DupUp3D.

    (B, T, H, W, C) becomes (B, T · time, H · space, W · space, out_dim), with out_dim · time · space² a
    multiple of C. Each of the time · space² outputs of a cell is a choice of its channels, so nothing is
    repeated here.
    """
    B, T, H, W, C = x.shape
    each = time * space**2
    # Output channel o at place p is channel (each · o + p) // repeats.
    index = np.arange(out_dim * each).reshape(out_dim, each) // (out_dim * each // C)
    places = iter([_channels(x, index[:, place]) for place in range(each)])
    frames = [
        jnp.stack([jnp.stack([next(places) for _ in range(space)], 4) for _ in range(space)], 3)
        for _ in range(time)
    ]
    return jnp.stack(frames, 2).reshape(B, T * time, H * space, W * space, out_dim)


def _channels(x: jax.Array, index: np.ndarray[Any, Any]) -> jax.Array:
    """Returns x[..., index]; as a slice if the channels are evenly apart."""
    step = max(1, int(index[-1] - index[0]) // max(1, len(index) - 1))
    if np.array_equal(index, np.arange(index[0], index[-1] + 1, step)):
        return lax.slice_in_dim(x, int(index[0]), int(index[-1]) + 1, step, -1)
    return x[..., index]


class ResidualDownBlock(nnx.Module):
    """Residual blocks, then downsampling except at the last level, and a shortcut around both.

    ``temporal`` is whether time is halved too; None at the last level, which does not downsample. Source:
    diffusers' WanResidualDownBlock.
    """

    def __init__(self, in_dim: int, out_dim: int, num_blocks: int, temporal: bool | None, dtype: Any) -> None:
        self.resnets = nnx.List(
            [ResidualBlock(out_dim if i else in_dim, out_dim, dtype) for i in range(num_blocks)]
        )
        self.has_downsampler = temporal is not None
        if temporal is not None:
            self.downsampler = Downsample(out_dim, temporal, dtype)
        self.out_dim, self.time, self.space = out_dim, 2 if temporal else 1, 2 if self.has_downsampler else 1

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        """(B, T, H, W, I) to (B, T or T / 2, H / 2, W / 2, O), or (B, T, H, W, O) at the last level."""
        shortcut = average_down(stream.real(x), self.out_dim, self.time, self.space)
        x = stream.through(self.resnets, x)
        if self.has_downsampler:
            x = self.downsampler(x, stream)
        return x + shortcut


class ResidualUpBlock(UpBlock):
    """An ``UpBlock`` that keeps its channels when it upsamples, with a shortcut except at the last level.

    Source: diffusers' WanResidualUpBlock.
    """

    def __init__(self, in_dim: int, out_dim: int, num_blocks: int, temporal: bool | None, dtype: Any) -> None:
        super().__init__(in_dim, out_dim, num_blocks, temporal, dtype, upsampled_dim=out_dim)
        self.out_dim, self.time = out_dim, 2 if temporal else 1

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        """(B, T, H, W, I) to (B, T or 2T, 2H, 2W, O), or (B, T, H, W, O) at the last level."""
        y = super().__call__(x, stream)
        if not self.has_upsampler:
            return y
        # The first frame becomes several; only the last of them is kept.
        return y + duplicate_up(x, self.out_dim, self.time, 2)[:, -y.shape[1] :]
