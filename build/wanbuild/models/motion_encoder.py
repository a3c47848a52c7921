"""The motion encoder of Wan Animate, which turns the motion of a face into a vector.

Source: diffusers' WanAnimateMotionEncoder, after StyleGAN2's discriminator and the linear motion
decomposition of LIA (arXiv:2203.09043). Axes: F frames, S pixels per side, C channels; convolutions are
(F, H, W, C).

All arrays are float32, whatever the storage dtype and the transformer's compute dtype. Only the last matmul
asks for full precision, so a TPU multiplies in bfloat16 in the others. The encoder runs once per window, and
takes 38 GFLOP for a face of the published 512x512, 3 TFLOP for 77 faces; a denoising step of the published
model takes 2000 TFLOP at 720p.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from wanbuild.models.animate_config import AnimateConfig
from wanbuild.models.layers import Linear
from wanbuild.models.loops import map_leading
from wanbuild.models.params import param

_FIR = (0.125, 0.375, 0.375, 0.125)
"""The blur along one axis; its outer product with itself is the reference's 4x4 table."""

_LINEAR_LAYERS = 5


def blur(x: jax.Array, padding: int, stride: int) -> jax.Array:
    """Blurs every channel of (F, H, W, C) with the 4x4 filter, ``padding`` zeros on each of the four sides.

    The result is (F, (H + 2 padding - 4) / stride + 1, the same for W, C), rounded down. It sums shifted
    images, one axis after the other: XLA's CPU backend takes 40 to 90 times as long for a convolution of
    single channels.
    """
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    for axis in (1, 2):
        last = x.shape[axis] - len(_FIR)
        x = sum(
            (
                weight * lax.slice_in_dim(x, tap, tap + last + 1, stride, axis)
                for tap, weight in enumerate(_FIR)
            ),
            jnp.zeros((), x.dtype),
        )
    return x


def orthonormal(matrix: jax.Array) -> jax.Array:
    """Returns Q of a QR decomposition, float32 (M, N), of a float32 matrix (M, N) with M at least N.

    It uses Householder reflections. The signs of Q's columns are LAPACK's: the model has learnt them, and
    other libraries choose others. It uses only sums and products, so it is float32 on every platform, and a
    CPU program calls no LAPACK, for which the runtime would have to import SciPy.
    """
    M, N = matrix.shape
    rows = jnp.arange(M)

    def reflected(x: jax.Array, v: jax.Array, tau: jax.Array) -> jax.Array:
        return x - tau * v[:, None] * jnp.sum(v[:, None] * x, axis=0)

    def reduce(k: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        a, vectors, taus = state
        column = jnp.where(rows >= k, a[:, k], 0)
        below = jnp.where(rows > k, column, 0)
        pivot = a[k, k]
        # The new pivot has the sign that avoids cancellation. If all entries below are zero, the column and
        # its sign stay.
        done = jnp.all(below == 0)
        new = -jnp.copysign(jnp.sqrt(jnp.sum(jnp.square(column))), pivot)
        tau = jnp.where(done, 0, (new - pivot) / jnp.where(done, 1, new))
        v = jnp.where(rows == k, 1, below / jnp.where(done, 1, pivot - new))
        return reflected(a, v, tau), vectors.at[:, k].set(v), taus.at[k].set(tau)

    start = (matrix, jnp.zeros_like(matrix), jnp.zeros(N, matrix.dtype))
    _, vectors, taus = lax.fori_loop(0, N, reduce, start)

    def expand(i: jax.Array, q: jax.Array) -> jax.Array:
        k = N - 1 - i
        return reflected(q, vectors[:, k], taus[k])

    return lax.fori_loop(0, N, expand, jnp.eye(M, N, dtype=matrix.dtype))


class MotionConv(nnx.Module):
    """Convolution with its weight times 1/√(fan in), then optionally bias and leaky ReLU times √2."""

    def __init__(self, in_dim: int, out_dim: int, size: int, dtype: Any, activated: bool = True) -> None:
        self.weight = param((size, size, in_dim, out_dim), dtype, (None,) * 4)
        if activated:
            self.bias = param((out_dim,), dtype, (None,))
        self.activated = activated
        self.scale = 1 / math.sqrt(in_dim * size**2)

    def __call__(self, x: jax.Array, padding: int = 0, stride: int = 1) -> jax.Array:
        """float32 (F, H, W, I) to float32 (F, H', W', O)."""
        y = lax.conv_general_dilated(
            x,
            self.weight[...].astype(jnp.float32) * self.scale,
            (stride, stride),
            [(padding, padding)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        if not self.activated:
            return y
        return jax.nn.leaky_relu(y + self.bias[...].astype(jnp.float32), 0.2) * math.sqrt(2)


class MotionBlock(nnx.Module):
    """Halves height and width with two convolutions; a 1x1 convolution is the shortcut."""

    def __init__(self, in_dim: int, out_dim: int, dtype: Any) -> None:
        self.conv1 = MotionConv(in_dim, in_dim, 3, dtype)
        self.conv2 = MotionConv(in_dim, out_dim, 3, dtype)
        self.conv_skip = MotionConv(in_dim, out_dim, 1, dtype, activated=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32 (F, S, S, I) to float32 (F, S / 2, S / 2, O)."""
        y = self.conv2(blur(self.conv1(x, padding=1), padding=2, stride=1), stride=2)
        return (y + self.conv_skip(blur(x, padding=1, stride=2))) / math.sqrt(2)


class MotionEncoder(nnx.Module):
    """The layers that turn faces into motion vectors; the motion directions are stored in ``norm_dtype``."""

    def __init__(self, config: AnimateConfig, dtype: Any, norm_dtype: Any) -> None:
        channels, style = config.motion_channels, config.motion_style_dim
        self.conv_in = MotionConv(3, channels[0], 1, dtype)
        self.res_blocks = nnx.List(
            [MotionBlock(before, after, dtype) for before, after in pairwise(channels)]
        )
        self.conv_out = MotionConv(channels[-1], style, 4, dtype, activated=False)
        widths = [style] * _LINEAR_LAYERS + [config.motion_dim]
        self.motion_network = nnx.List(
            [Linear(before, after, dtype, (None, None)) for before, after in pairwise(widths)]
        )
        self.motion_synthesis_weight = param(
            (config.motion_encoder_dim, config.motion_dim), norm_dtype, (None, None)
        )
        self.batch = config.motion_encoder_batch_size

    def __call__(self, frames: jax.Array) -> jax.Array:
        """Returns a video's motion vectors, float32 (F, motion_encoder_dim), of frames uint8 (F, S, S, 3).

        It takes small batches, so that memory does not grow with the video. The reference uses black frames
        for no face.
        """
        count = len(frames)
        batches = -(-count // self.batch)
        rows = -(-count // batches)
        frames = jnp.pad(frames, ((0, batches * rows - count), (0, 0), (0, 0), (0, 0)))
        amounts = map_leading(self.amounts, frames.reshape(batches, rows, *frames.shape[1:]))
        directions = orthonormal(self.motion_synthesis_weight[...].astype(jnp.float32) + 1e-8)
        amounts = amounts.reshape(batches * rows, -1)[:count]
        return jnp.einsum("FA,CA->FC", amounts, directions, precision=lax.Precision.HIGHEST)

    def amounts(self, frames: jax.Array) -> jax.Array:
        """Returns each direction's weight in a motion: uint8 (F, S, S, 3) to float32 (F, motion_dim)."""
        x = self.conv_in(frames.astype(jnp.float32) / 255 * 2 - 1)
        for block in self.res_blocks:
            x = block(x)
        x = self.conv_out(x)[:, 0, 0]
        for linear in self.motion_network:
            x = linear(x * x.shape[-1] ** -0.5)
        return x
