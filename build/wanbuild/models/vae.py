"""The Wan VAE: encodes video to latents and decodes it, in pieces along time; diffusers' AutoencoderKLWan.

One model covers both forms. The form of Wan 2.2 TI2V has shortcuts around its levels and works on patches of
pixels, so a latent cell is 16x16 pixels instead of 8x8 (``VAEConfig.spatial``, s below).

The first frame is one piece. The rest goes through a ``lax.scan`` over pieces of equal length, which carries
the state of the causal convolutions. So memory beyond inputs and outputs does not grow with the number of
frames. The size of the pieces does not change the result: every layer is causal, and the zeros that fill the
last piece come after all frames that are kept.

With ``alike``, the first frame is the end of a piece like all others, behind frames that every layer takes
for zeros. Then there is one form of every layer to compile instead of two, for the time of one more piece,
and residual blocks of one shape that follow one another are a loop: a TPU's compiler takes seconds for each
convolution.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from wanbuild.models.columns import Columns
from wanbuild.models.convolution import Algorithm
from wanbuild.models.layers import Linear
from wanbuild.models.vae_blocks import (
    CausalConv3d,
    ChannelNorm,
    Downsample,
    MidBlock,
    ResidualBlock,
    Stream,
    UpBlock,
)
from wanbuild.models.vae_config import VAEConfig
from wanbuild.models.vae_residual import ResidualDownBlock, ResidualUpBlock, patchify, unpatchify

FRAMES_PER_LATENT = 4


class Encoder(nnx.Module):
    """diffusers' WanEncoder3d; down_blocks is a flat list or a list of levels, as in the checkpoint."""

    def __init__(self, config: VAEConfig, dtype: Any) -> None:
        dims = [config.base_dim * m for m in config.dim_mult]
        blocks: list[ResidualBlock | Downsample | ResidualDownBlock] = []
        in_dim = config.base_dim
        for dim, temporal in zip(dims, [*config.temperal_downsample, None], strict=True):
            if config.is_residual:
                blocks.append(ResidualDownBlock(in_dim, dim, config.num_res_blocks, temporal, dtype))
            else:
                for i in range(config.num_res_blocks):
                    blocks.append(ResidualBlock(dim if i else in_dim, dim, dtype))
                if temporal is not None:
                    blocks.append(Downsample(dim, temporal, dtype))
            in_dim = dim
        self.conv_in = CausalConv3d(config.in_channels, config.base_dim, dtype)
        self.down_blocks = nnx.List(blocks)
        self.mid_block = MidBlock(dims[-1], dtype)
        self.norm_out = ChannelNorm(dims[-1])
        self.conv_out = CausalConv3d(dims[-1], 2 * config.z_dim, dtype)

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        """(B, T, H, W, I) to (B, T / 4, H / 8, W / 8, 2 z); one frame stays one."""
        x = self.conv_in(x, stream)
        for kind, group in itertools.groupby(self.down_blocks, type):
            if kind is ResidualBlock:
                x = stream.through(cast(list[ResidualBlock], list(group)), x)
                continue
            for block in group:
                x = block(x, stream)
        x = self.mid_block(x, stream)
        return self.conv_out(self.norm_out(x, silu=True), stream)


class Decoder(nnx.Module):
    """diffusers' WanDecoder3d."""

    def __init__(self, config: VAEConfig, dtype: Any) -> None:
        dims = [config.decoder_dim * m for m in reversed(config.dim_mult)]
        # The decoder upsamples time in reverse order.
        temporal = [*reversed(config.temperal_downsample), None]
        blocks: list[UpBlock] = []
        in_dim = dims[0]
        for dim, upsample in zip(dims, temporal, strict=True):
            if config.is_residual:
                blocks.append(ResidualUpBlock(in_dim, dim, config.num_res_blocks + 1, upsample, dtype))
                in_dim = dim
            else:
                blocks.append(UpBlock(in_dim, dim, config.num_res_blocks + 1, upsample, dtype, dim // 2))
                in_dim = dim // 2
        self.conv_in = CausalConv3d(config.z_dim, dims[0], dtype)
        self.mid_block = MidBlock(dims[0], dtype)
        self.up_blocks = nnx.List(blocks)
        self.norm_out = ChannelNorm(dims[-1])
        self.conv_out = CausalConv3d(dims[-1], config.out_channels, dtype)

    def __call__(self, x: jax.Array, stream: Stream) -> jax.Array:
        """(B, T, h, w, z) to (B, 4T, 8h, 8w, O); one frame stays one."""
        x = self.mid_block(self.conv_in(x, stream), stream)
        for block in self.up_blocks:
            x = block(x, stream)
        return self.conv_out(self.norm_out(x, silu=True), stream)


class WanVAE(nnx.Module):
    """Encoder, decoder and their 1x1x1 convolutions, with abstract parameters until ``bind``.

    Args:
        config: the checkpoint's configuration.
        param_dtype: dtype of the stored weights and biases; norms are stored in float32.
    """

    def __init__(self, config: VAEConfig, param_dtype: Any = jnp.float32) -> None:
        z = config.z_dim
        self.encoder = Encoder(config, param_dtype)
        self.quant_conv = Linear(2 * z, 2 * z, param_dtype, (None, None))
        self.post_quant_conv = Linear(z, z, param_dtype, (None, None))
        self.decoder = Decoder(config, param_dtype)
        self.patch_size, self.spatial = config.patch_size, config.spatial

    def decode(
        self,
        latents: jax.Array,
        chunk: int,
        *,
        dtype: Any = jnp.float32,
        algorithm: Algorithm = "direct",
        alike: bool = False,
        finish: Callable[[jax.Array], jax.Array] | None = None,
        keep_last: int = 0,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Decodes latents to a video.

        Args:
            latents: (B, z, t, h, w), denormalised.
            chunk: latent frames per piece after the first frame.
            dtype: dtype of the activations; norms and sums are in float32.
            algorithm: the form of the convolutions: ``winograd`` for the CPU, ``direct`` elsewhere.
            alike: whether the first frame is padded to a piece of the length of all others.
            finish: applied to each piece of the video, (B, T, s h, s w, 3) float32 in [-1, 1]. It must work
                frame by frame. Converting to uint8 here avoids holding a whole video in float32.
            keep_last: the number of last frames to return unfinished too; only these are kept in float32 from
                piece to piece.

        Returns:
            (B, 4 (t - 1) + 1, s h, s w, 3), float32 in [-1, 1] unless finish converts it; with keep_last also
            (B, keep_last, s h, s w, 3) float32, with zeros in front of a shorter video.
        """

        def piece(x: Any, state: Any, padded: jax.Array | None = None) -> tuple[jax.Array, Any]:
            z, real = x
            caches, last = state or (None, None)
            stream = Stream(caches, algorithm, columns, padded)
            y = self.decoder(self.post_quant_conv(z), stream)
            if self.patch_size is not None:
                y = unpatchify(y, self.patch_size)
            y = jnp.clip(y.astype(jnp.float32), -1.0, 1.0)
            if keep_last:
                last = jnp.zeros_like(y, shape=(len(y), keep_last, *y.shape[2:])) if last is None else last
                y = stream.real(y)
                frames = jnp.sum(real[0]) * (y.shape[1] // z.shape[1])
                frames = stream.choose(jnp.full_like(frames, y.shape[1]), frames)
                last = lax.dynamic_slice_in_dim(jnp.concatenate([last, y], 1), frames, keep_last, 1)
            return (finish(y) if finish else y), (tuple(stream.caches), last)

        def decode(latents: jax.Array) -> Any:
            latents = jnp.moveaxis(latents, 1, -1).astype(dtype)
            latents = latents if columns is None else columns.take(latents)
            # Zero for frames that only fill a piece: they are not part of the video.
            real = jnp.ones(latents.shape[:2], jnp.int32) if keep_last else None
            rest_frames = (latents.shape[1] - 1) * FRAMES_PER_LATENT
            video, (_, last) = _by_pieces(piece, (latents, real), chunk, rest_frames, alike)
            return (video, last) if keep_last else video

        columns = Columns.of(latents.shape[-1])
        if columns is None:
            return decode(latents)  # type: ignore[no-any-return]
        return columns.run(decode, latents, self.spatial)  # type: ignore[no-any-return]

    def encode(
        self,
        video: Any,
        chunk: int,
        *,
        dtype: Any = jnp.float32,
        algorithm: Algorithm = "direct",
        alike: bool = False,
        start: Callable[[Any], jax.Array] | None = None,
        only_first: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Encodes a video to the moments of its latents, not normalised.

        Args:
            video: (B, 4n + 1, H, W, 3) in [-1, 1], H and W multiples of s; or any pytree with the same first
                two axes, which ``start`` converts to that.
            chunk: latent frames (four video frames each) per piece after the first frame.
            dtype: dtype of the activations; norms and sums are in float32.
            algorithm: the form of the convolutions: ``winograd`` for the CPU, ``direct`` elsewhere.
            alike: whether the first frame is padded to a piece of the length of all others.
            start: applied to each piece of the video before it is encoded, e.g. from uint8 to [-1, 1]. It
                must work frame by frame. The last piece may be filled with frames of zeros.
            only_first: bool scalar; if true, only the first frame is encoded and the rest of the result is
                meaningless, so images and videos share one program.

        Returns:
            mean (the mode) and log variance (clipped to [-30, 20]), (B, z, n + 1, H / s, W / s)
            float32.

        Raises:
            ValueError: if the number of frames, the height or the width is not valid.
        """
        T, H, W = (jax.eval_shape(start, video) if start else video).shape[1:4]
        if T % FRAMES_PER_LATENT != 1 or H % self.spatial or W % self.spatial:
            raise ValueError(
                f"a video to encode has 4n+1 frames and multiples of {self.spatial} pixels, not {(T, H, W)}"
            )

        def piece(x: Any, caches: Any, padded: jax.Array | None = None) -> tuple[jax.Array, Any]:
            stream = Stream(caches, algorithm, columns, padded)
            x = start(x) if start else x
            x = (x if columns is None else columns.take(x)).astype(dtype)
            y = self.encoder(x if self.patch_size is None else patchify(x, self.patch_size), stream)
            return self.quant_conv(y, jnp.float32), tuple(stream.caches)

        rest = (T - 1) // FRAMES_PER_LATENT

        def encode(video: Any) -> jax.Array:
            return _by_pieces(piece, video, chunk * FRAMES_PER_LATENT, rest, alike, only_first)[0]

        columns = Columns.of(W // self.spatial)
        moments = encode(video) if columns is None else columns.run(encode, video, 1)
        mean, logvar = jnp.split(jnp.moveaxis(moments, -1, 1), 2, axis=1)
        return mean, jnp.clip(logvar, -30.0, 20.0)


def _by_pieces(
    piece: Callable[..., tuple[jax.Array, Any]],
    x: Any,
    size: int,
    rest_out: int,
    alike: bool,
    only_first: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Runs the first frame, then the rest in equal pieces, and joins the results along time.

    Args:
        piece: maps a piece (B, n, ...), the state (None before the first frame) and, with ``alike``, whether
            it is the first one, to its result and state.
        x: a pytree of arrays (B, 1 + T, ...).
        size: most frames per piece (a multiple of four for video frames).
        rest_out: output frames of the T frames after the first.
        alike: whether the first frame is the end of a piece of the same length.
        only_first: bool scalar; if true, the rest is not run and its result is zeros.

    Returns:
        The result, and the state after the last piece.

    Raises:
        ValueError: if size is less than one.
    """
    if size < 1:
        raise ValueError(f"a piece of {size} frames")
    T = jax.tree.leaves(x)[0].shape[1] - 1
    if T == 0:
        return piece(x, None)
    # As many pieces as the size requires, but of equal length: 20 frames by 16 are two pieces of 10.
    unit = max(1, T // rest_out)
    count = -(-T // size)
    size = -(-T // (count * unit)) * unit
    run = _run_alike if alike else _run_apart
    return run(piece, x, count, size, rest_out, only_first)


def _cut(leaf: jax.Array, count: int, size: int, before: int = 0) -> jax.Array:
    """Returns pieces (count, B, size, ...) of (B, T, ...), with ``before`` frames of zeros in front."""
    after = count * size - leaf.shape[1] - before
    leaf = jnp.pad(leaf, ((0, 0), (before, after), *((0, 0),) * (leaf.ndim - 2)))
    return jnp.moveaxis(leaf.reshape(len(leaf), count, size, *leaf.shape[2:]), 1, 0)


def _run_apart(
    piece: Callable[..., tuple[jax.Array, Any]],
    x: Any,
    count: int,
    size: int,
    rest_out: int,
    only_first: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Runs the first frame as one piece, and the rest as ``count`` pieces of ``size``; see ``_by_pieces``."""
    y, state = piece(jax.tree.map(lambda leaf: leaf[:, :1], x), None)
    rest = jax.tree.map(lambda leaf: leaf[:, 1:], x)

    def step(state: Any, x: Any) -> tuple[Any, jax.Array]:
        y, state = piece(x, state)
        return state, y

    if count == 1 and only_first is None:
        outputs, state = piece(rest, state)
        return jnp.concatenate([y, outputs], 1), state
    pieces = jax.tree.map(lambda leaf: _cut(leaf, count, size), rest)
    steps = None if only_first is None else jnp.where(only_first, 0, count)
    state, outputs = _scan(step, state, pieces, steps)
    return jnp.concatenate([y, outputs[:, :rest_out]], 1), state


def _run_alike(
    piece: Callable[..., tuple[jax.Array, Any]],
    x: Any,
    count: int,
    size: int,
    rest_out: int,
    only_first: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Runs all in pieces of ``size``, of which the first ends with the first frame; see ``_by_pieces``."""
    pieces = jax.tree.map(lambda leaf: _cut(leaf, count + 1, size, size - 1), x)
    first = jax.tree.map(lambda leaf: leaf[0], pieces)
    made = jax.eval_shape(lambda x: piece(x, None, jnp.bool_(True))[1], first)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), made)

    def step(state: Any, x: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        y, state = piece(x[0], state, x[1])
        return state, y

    steps = None if only_first is None else jnp.where(only_first, 1, count + 1)
    state, outputs = _scan(step, state, (pieces, jnp.arange(count + 1) == 0), steps)
    before = outputs.shape[1] // (count + 1) - 1
    return outputs[:, before : before + 1 + rest_out], state


def _scan(
    step: Callable[[Any, Any], tuple[Any, jax.Array]], state: Any, pieces: Any, steps: jax.Array | None
) -> tuple[Any, jax.Array]:
    """Runs ``lax.scan`` over the pieces, or the first ``steps`` of them; joins the results along time."""
    if steps is None:
        state, outputs = lax.scan(step, state, pieces)
    else:
        # A branch around the scan would make XLA copy the large state.
        state, outputs = _scan_some(step, state, pieces, steps)
    outputs = jnp.moveaxis(outputs, 0, 1)
    return state, outputs.reshape(len(outputs), -1, *outputs.shape[3:])


def _scan_some(
    step: Callable[[Any, Any], tuple[Any, jax.Array]], state: Any, pieces: Any, steps: jax.Array
) -> tuple[Any, jax.Array]:
    """Runs ``lax.scan`` over the first ``steps`` pieces; the results of the others are zeros."""

    def at(index: jax.Array | int) -> Any:
        return jax.tree.map(lambda leaf: leaf[index], pieces)

    def body(index: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        state, outputs = carry
        state, y = step(state, at(index))
        return state, lax.dynamic_update_index_in_dim(outputs, y, index, 0)

    count = len(jax.tree.leaves(pieces)[0])
    y = jax.eval_shape(step, state, at(0))[1]
    return lax.fori_loop(0, steps, body, (state, jnp.zeros((count, *y.shape), y.dtype)))  # type: ignore[no-any-return]
