"""Blocks of the Wan VAE: causal convolutions with their history, norms, attention, resampling.

A video passes through the VAE in pieces along time. A ``Stream`` carries the causal layers' history from
piece to piece. The first latent frame is one video frame and its own piece: resampling in time starts after
it (diffusers' ``autoencoder_kl_wan``, ``feat_cache``).

Activations are (B, T, H, W, C). Attributes have the checkpoint's names where those are good.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from wanbuild.models import convolution
from wanbuild.models.columns import Columns
from wanbuild.models.layers import Linear
from wanbuild.models.params import param
from wanbuild.models.tiles import Tile

_SCORE_BYTES = 64 << 20
"""Limit on attention scores held at once: 720p has 14 400 tokens per frame, 0.8 GB of scores."""


class Stream:
    """The layers' history of earlier pieces; one instance exists while one piece is traced.

    Layers use it in the order in which they run, which is the same for every piece.

    Args:
        caches: the previous piece's ``caches``; None if there is none.
        columns: this device's columns of the video; None if one device has them all.
        padded: bool scalar, true in a first piece that ends with the first frame and has the length of all
            others: the frames before it are not part of the video. None if the first piece is one frame.
        tile: the part of the video that the piece is of; None for all of it.
    """

    def __init__(
        self,
        caches: Sequence[jax.Array] | None,
        algorithm: convolution.Algorithm,
        columns: Columns | None = None,
        padded: jax.Array | None = None,
        tile: Tile | None = None,
    ) -> None:
        self.first = caches is None and padded is None
        self.algorithm, self.columns, self.padded, self.tile = algorithm, columns, padded, tile
        self.caches: list[jax.Array] = []
        self._previous = iter(caches or ())

    def extend(self, x: jax.Array, frames: int) -> jax.Array:
        """Puts the previous piece's last frames (zeros for the first piece) in front of x (B, T, H, W, C).

        Returns (B, frames + T, H, W, C), whose last ``frames`` frames are stored for the next piece.
        """
        past = next(self._previous, None)
        past = jnp.zeros((x.shape[0], frames, *x.shape[2:]), x.dtype) if past is None else past
        x = jnp.concatenate([past, self.real(x)], 1)
        self.caches.append(x[:, -frames:])
        return x

    def through(self, layers: Sequence[ResidualBlock] | Sequence[NormConv], x: jax.Array) -> jax.Array:
        """Applies layers in turn, from (B, T, H, W, I) to (B, T, H, W, O).

        Where pieces are alike, neighbours that are alike (these keep x's shape) run in one loop, and their
        history is kept as one array for each of their layers.
        """
        if self.padded is None:
            for layer in layers:
                x = layer(x, self)
            return x
        for _, group in itertools.groupby(map(nnx.split, layers), lambda parts: _shapes(parts[1])):
            x = self._loop(list(group), x)
        return x

    def _loop(self, layers: Sequence[tuple[Any, Any]], x: jax.Array) -> jax.Array:
        """Applies layers of one shape, each split into its graph and its parameters."""
        if len(layers) == 1:
            return nnx.merge(*layers[0])(x, self)  # type: ignore[no-any-return]
        (graph, first), states = layers[0], [state for _, state in layers]
        weights = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

        def apply(x: jax.Array, state: Any, caches: Any) -> tuple[jax.Array, Any]:
            stream = Stream(caches, self.algorithm, self.columns, self.padded, self.tile)
            y = nnx.merge(graph, state)(x, stream)
            return y, tuple(stream.caches)

        def step(carry: tuple[jax.Array, Any], layer: tuple[jax.Array, Any]) -> tuple[Any, None]:
            (x, all_caches), (i, state) = carry, layer
            caches = jax.tree.map(lambda cache: lax.dynamic_index_in_dim(cache, i, 0, False), all_caches)
            x, caches = apply(x, state, caches)
            put = functools.partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
            return (x, jax.tree.map(put, all_caches, caches)), None

        past = []
        for one in jax.eval_shape(lambda x: apply(x, first, None)[1], x):
            none = jnp.zeros((len(layers), *one.shape), one.dtype)
            found = next(self._previous, None)
            past.append(none if found is None else found)
        # The caches are carried, and so updated in place; as results of the loop they would exist twice.
        (x, caches), _ = lax.scan(step, (x, tuple(past)), (jnp.arange(len(layers)), weights))
        self.caches.extend(caches)
        return x

    def real(self, x: jax.Array) -> jax.Array:
        """Returns x (B, T, ...) with zeros for the frames in front of the first one."""
        if self.padded is None or x.shape[1] == 1:
            return x
        before = jnp.arange(x.shape[1]) < x.shape[1] - 1
        zero = jnp.zeros((), x.dtype)
        return jnp.where(self.padded & before.reshape(-1, *(1,) * (x.ndim - 2)), zero, x)

    def choose(self, first: jax.Array, rest: jax.Array) -> jax.Array:
        """Returns ``first`` in a padded first piece, and ``rest`` in any other."""
        return rest if self.padded is None else jnp.where(self.padded, first, rest)

    def beside(self, x: jax.Array, before: int = 1, after: int = 1) -> jax.Array:
        """Returns x with zeros outside of the video, and columns of neighbours if devices share them."""
        x = x if self.tile is None else self.tile.masked(x)
        return x if self.columns is None else self.columns.beside(x, before, after)

    def own(self, y: jax.Array, others: int = 1) -> jax.Array:
        """Returns y without this many columns on each side, which the neighbours compute too."""
        return y if self.columns is None else y[:, :, :, others:-others]


def _shapes(parameters: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(leaf.shape for leaf in jax.tree.leaves(parameters))


def _silu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


class ChannelNorm(nnx.Module):
    """x / max(|x|, 1e-12) · sqrt(C) · gamma over the channels, in float32; diffusers' WanRMS_norm."""

    def __init__(self, dim: int) -> None:
        self.gamma = param((dim,), jnp.float32, (None,))

    def __call__(self, x: jax.Array, silu: bool = False) -> jax.Array:
        """Normalises x (..., C), and applies SiLU if asked; returns x's dtype."""
        y = x.astype(jnp.float32)
        square = jnp.sum(jnp.square(y), axis=-1, keepdims=True)
        # The square of 1e-12 is a normal float32, so the maximum can be taken before the root.
        y = (
            y
            * lax.rsqrt(jnp.maximum(square, 1e-24))
            * (self.gamma[...].astype(jnp.float32) * x.shape[-1] ** 0.5)
        )
        return (_silu(y) if silu else y).astype(x.dtype)


class CausalConv3d(nnx.Module):
    """3x3x3 convolution over a frame and the two before it; diffusers' WanCausalConv3d."""

    def __init__(self, in_dim: int, out_dim: int, dtype: Any) -> None:
        self.weight = param((3, 3, 3, in_dim, out_dim), dtype, (None,) * 5)
        self.bias = param((out_dim,), dtype, (None,))

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        """(B, T, H, W, I) to (B, T, H, W, O)."""
        x = stream.beside(x)
        extended = stream.extend(x, 2)
        if stream.first:
            # The two frames before the first are zeros, so only the last tap counts.
            y = convolution.conv3x3(x, self.weight[...][2])
        else:
            y = convolution.conv3x3x3(extended, self.weight[...], stream.algorithm)
        return stream.own(y) + self.bias[...].astype(y.dtype)


class TimeConv(nnx.Module):
    """Three-tap convolution along time."""

    def __init__(self, in_dim: int, out_dim: int, dtype: Any) -> None:
        self.weight = param((3, 1, 1, in_dim, out_dim), dtype, (None,) * 5)
        self.bias = param((out_dim,), dtype, (None,))

    def __call__(self, x: jax.Array, stride: int) -> jax.Array:
        """(B, T, H, W, I) to (B, (T - 3) / stride + 1, H, W, O)."""
        y = convolution.taps(x, self.weight[...][:, 0, 0], stride)
        return y + self.bias[...].astype(y.dtype)


class Conv2d(nnx.Module):
    """The parameters of a 3x3 convolution of every frame."""

    def __init__(self, in_dim: int, out_dim: int, dtype: Any) -> None:
        self.weight = param((3, 3, in_dim, out_dim), dtype, (None,) * 4)
        self.bias = param((out_dim,), dtype, (None,))


class NormConv(nnx.Module):
    """A norm, SiLU and a convolution."""

    def __init__(self, norm: ChannelNorm, conv: CausalConv3d) -> None:
        self.norm, self.conv = norm, conv

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        """(B, T, H, W, I) to (B, T, H, W, O)."""
        return self.conv(self.norm(x, silu=True), stream)


class ResidualBlock(nnx.Module):
    """Two norm-SiLU-convolution steps and a shortcut; diffusers' WanResidualBlock."""

    def __init__(self, in_dim: int, out_dim: int, dtype: Any) -> None:
        self.norm1 = ChannelNorm(in_dim)
        self.conv1 = CausalConv3d(in_dim, out_dim, dtype)
        self.norm2 = ChannelNorm(out_dim)
        self.conv2 = CausalConv3d(out_dim, out_dim, dtype)
        self.has_shortcut = in_dim != out_dim
        if self.has_shortcut:
            self.conv_shortcut = Linear(in_dim, out_dim, dtype, (None, None))

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        """(B, T, H, W, I) to (B, T, H, W, O)."""
        steps = NormConv(self.norm1, self.conv1), NormConv(self.norm2, self.conv2)
        y = stream.through(steps, x)
        return y + (self.conv_shortcut(x) if self.has_shortcut else x)


class AttentionBlock(nnx.Module):
    """Attention of one head over the pixels of each frame; diffusers' WanAttentionBlock."""

    def __init__(self, dim: int, dtype: Any) -> None:
        self.norm = ChannelNorm(dim)
        self.to_qkv = Linear(dim, 3 * dim, dtype, (None, None))
        self.proj = Linear(dim, dim, dtype, (None, None))

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        """(B, T, H, W, C) to the same."""
        B, T, H, W, C = x.shape
        qkv = self.to_qkv(self.norm(x))
        if stream.columns is not None:
            y = self._to_all(qkv, stream.columns)
        else:
            frames = qkv.reshape(B * T, H * W, 3 * C)
            inside = None if stream.tile is None else stream.tile.inside(H, W)
            mask = None if inside is None else inside.reshape(-1)
            attend = functools.partial(_attend, mask=mask)
            y = lax.map(lambda frame: attend(*jnp.split(frame, 3, axis=-1)), frames)
        return x + self.proj(y.reshape(x.shape))

    def _to_all(self, qkv: jax.Array, columns: Columns) -> jax.Array:
        """Attention of this device's pixels to those of all devices: (B, T, H, W, 3 C) to (B T, H W, C)."""
        B, T, H, _, C3 = qkv.shape
        q, kv = jnp.split(qkv, [C3 // 3], axis=-1)
        kv, real = columns.all(kv)
        mask = None if real is None else jnp.tile(real, H)

        def attend(frame: tuple[jax.Array, jax.Array]) -> jax.Array:
            k, v = jnp.split(frame[1], 2, axis=-1)
            return _attend(frame[0], k, v, mask)

        return lax.map(attend, (q.reshape(B * T, -1, C3 // 3), kv.reshape(B * T, -1, C3 // 3 * 2)))


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Computes softmax(q kᵀ / sqrt(C)) v, in blocks of queries: q (S, C), k and v (T, C), mask bool (T,)."""
    S, C = q.shape
    blocks = -(-S * len(k) * 4 // _SCORE_BYTES)
    size = -(-S // blocks)

    def block(q: jax.Array) -> jax.Array:
        scores = lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        scores = scores * (1.0 / math.sqrt(C))
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        y = lax.dot_general(
            weights.astype(v.dtype), v, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return (y / jnp.sum(weights, axis=-1, keepdims=True)).astype(v.dtype)

    if blocks == 1:
        return block(q)
    q = jnp.pad(q, ((0, blocks * size - S), (0, 0)))
    return lax.map(block, q.reshape(blocks, size, C)).reshape(-1, C)[:S]


class MidBlock(nnx.Module):
    """Residual block, attention, residual block; diffusers' WanMidBlock."""

    def __init__(self, dim: int, dtype: Any) -> None:
        self.resnets = nnx.List([ResidualBlock(dim, dim, dtype) for _ in range(2)])
        self.attentions = nnx.List([AttentionBlock(dim, dtype)])

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        """(B, T, H, W, C) to the same."""
        return self.resnets[1](self.attentions[0](self.resnets[0](x, stream), stream), stream)


class Downsample(nnx.Module):
    """Halves height and width, and time after the first frame; diffusers' WanResample, downsample."""

    def __init__(self, dim: int, temporal: bool, dtype: Any) -> None:
        self.resample = Conv2d(dim, dim, dtype)
        self.temporal = temporal
        if temporal:
            self.time_conv = TimeConv(dim, dim, dtype)

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        """(B, T, H, W, C) to (B, T or T / 2, H / 2, W / 2, C); one frame stays one."""
        x = stream.beside(x, before=0)
        y = convolution.conv3x3(x, self.resample.weight[...], stride=2)
        y = y + self.resample.bias[...].astype(y.dtype)
        if self.temporal:
            extended = stream.extend(y, 1)
            y = y if stream.first else stream.choose(y[:, 1::2], self.time_conv(extended, stride=2))
        return y


class Upsample(nnx.Module):
    """Doubles height and width, and time after the first frame; diffusers' WanResample, upsample."""

    def __init__(self, in_dim: int, out_dim: int, temporal: bool, dtype: Any) -> None:
        self.resample = Conv2d(in_dim, out_dim, dtype)
        self.temporal = temporal
        if temporal:
            self.time_conv = TimeConv(in_dim, 2 * in_dim, dtype)

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        """(B, T, H, W, C) to (B, T or 2T, 2H, 2W, O); one frame stays one."""
        if self.temporal:
            # The first frame is not convolved in time; the next frames see zeros in its place.
            none = jnp.zeros_like(x)
            extended = stream.extend(none if stream.first else stream.choose(none, x), 2)
            if not stream.first:
                B, T, H, W, C = x.shape
                y = self.time_conv(extended, stride=1).reshape(B, T, H, W, 2, C)
                y = jnp.moveaxis(y, 4, 2).reshape(B, 2 * T, H, W, C)
                x = stream.choose(jnp.repeat(x, 2, axis=1), y)
        y = convolution.upsample_conv3x3(stream.beside(x), self.resample.weight[...], stream.algorithm)
        return stream.own(y, 2) + self.resample.bias[...].astype(y.dtype)


class UpBlock(nnx.Module):
    """Residual blocks, then upsampling except at the last level; diffusers' WanUpBlock.

    ``temporal`` is whether time is doubled too; None at the last level, which does not upsample. Residual
    blocks have ``out_dim`` channels of output, upsampling has ``upsampled_dim``.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        num_blocks: int,
        temporal: bool | None,
        dtype: Any,
        upsampled_dim: int,
    ) -> None:
        self.resnets = nnx.List(
            [ResidualBlock(out_dim if i else in_dim, out_dim, dtype) for i in range(num_blocks)]
        )
        self.has_upsampler = temporal is not None
        if temporal is not None:
            self.upsampler = Upsample(out_dim, upsampled_dim, temporal, dtype)

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        """(B, T, H, W, I) to (B, T or 2T, 2H, 2W, U), or (B, T, H, W, O) at the last level."""
        x = stream.through(self.resnets, x)
        return self.upsampler(x, stream) if self.has_upsampler else x
