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

import functools
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
from wanbuild.models.pieces import by_pieces
from wanbuild.models.tiles import Tile, Tiles
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

Past = dict[str, jax.Array]
"""The history of the decoder's layers, by names in their order."""

HISTORY = "past"
"""The name of ``Past`` among the arguments of programs."""


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

    ``param_dtype`` is the dtype of the stored weights and biases; norms are stored in float32.
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
        tile: int = 0,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Decodes latents to a video.

        The video is (B, 4 (t - 1) + 1, s h, s w, 3), float32 in [-1, 1] unless ``finish`` converts it; with
        ``keep_last`` the last frames are returned too, (B, keep_last, s h, s w, 3) float32, with zeros in
        front of a shorter video.

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
            tile: pixels of the side of tiles, a multiple of ``TILE_UNIT`` s; 0 for none. Not on a mesh.
        """

        def piece(x: Any, state: Any, padded: jax.Array | None = None) -> tuple[jax.Array, Any]:
            z, real = x
            caches, last = state or (None, None)
            stream = Stream(caches, algorithm, columns, padded)
            y = self._pixels(self.decoder(self.post_quant_conv(z), stream))
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
            video, (_, last) = by_pieces(piece, (latents, real), chunk, rest_frames, alike)
            return (video, last) if keep_last else video

        height, width = latents.shape[-2:]
        if (tiles := Tiles.of(height, width, tile // self.spatial)) is not None:
            run = functools.partial(self._decode_tile, chunk=chunk, algorithm=algorithm, alike=alike)
            moved = jnp.moveaxis(latents, 1, -1).astype(dtype)
            made = tiles.joined(lambda tile: run(moved, tile), lambda y: self._kept(y, finish, keep_last))
            return made if keep_last else made[0]  # type: ignore[no-any-return]
        columns = Columns.of(latents.shape[-1])
        if columns is None:
            return decode(latents)  # type: ignore[no-any-return]
        return columns.run(decode, latents, self.spatial)  # type: ignore[no-any-return]

    def decode_piece(
        self,
        latents: jax.Array,
        past: Past | None,
        *,
        dtype: Any = jnp.float32,
        algorithm: Algorithm = "direct",
        first: jax.Array | None = None,
        finish: Callable[[jax.Array], Any] | None = None,
    ) -> tuple[Any, Past]:
        """Decodes one piece of a video, after all earlier ones: together they are what ``decode`` returns.

        Args:
            latents: (B, z, n, h, w), denormalised. The first piece is the first frame; the frames that fill a
                last piece may be any.
            past: the state that the piece before returned; None before the first one.
            finish: as for ``decode``; it may return several arrays.
            first: where pieces are alike, bool scalar, whether this is the first one: the first frame is its
                last, and ``past`` is zeros.

        Returns the frames (B, 4 n, s h, s w, 3), of the first frame one, and what the next piece takes, by
        names in the order of the layers. Of a first piece that is like all others the last frame counts.
        """

        def piece(z: jax.Array, past: Past | None) -> tuple[Any, Past]:
            caches = None if past is None else [past[name] for name in sorted(past)]
            stream = Stream(caches, algorithm, columns, first)
            z = z if columns is None else columns.take(z)
            y = self._pixels(self.decoder(self.post_quant_conv(z), stream))
            left = {f"{number:02}": cache for number, cache in enumerate(stream.caches)}
            return (finish(y) if finish else y), left

        latents, columns = jnp.moveaxis(latents, 1, -1).astype(dtype), Columns.of(latents.shape[-1])
        if columns is None:
            return piece(latents, past)
        return columns.carry(piece, latents, past, self.spatial)

    def _pixels(self, y: jax.Array) -> jax.Array:
        """Returns the decoder's result as pixels, float32 in [-1, 1]."""
        y = y if self.patch_size is None else unpatchify(y, self.patch_size)
        return jnp.clip(y.astype(jnp.float32), -1.0, 1.0)

    def _kept(
        self, y: jax.Array, finish: Callable[[jax.Array], jax.Array] | None, keep_last: int
    ) -> tuple[jax.Array, ...]:
        """Returns the finished frames of the decoder's result, and the last ones unfinished."""
        y = self._pixels(y)
        video = finish(y) if finish else y
        if not keep_last:
            return (video,)
        y = jnp.pad(y, ((0, 0), (max(0, keep_last - y.shape[1]), 0), *((0, 0),) * 3))
        return video, y[:, -keep_last:]

    def _decode_tile(
        self, latents: jax.Array, tile: Tile, chunk: int, algorithm: Algorithm, alike: bool
    ) -> jax.Array:
        """Returns the decoder's result for a tile of latents (B, t, h, w, z), float32."""

        def piece(z: jax.Array, caches: Any, padded: jax.Array | None = None) -> tuple[jax.Array, Any]:
            stream = Stream(caches, algorithm, None, padded, tile)
            y = self.decoder(self.post_quant_conv(z), stream)
            return y.astype(jnp.float32), tuple(stream.caches)

        rest_frames = (latents.shape[1] - 1) * FRAMES_PER_LATENT
        return by_pieces(piece, tile.take(latents), chunk, rest_frames, alike)[0]

    def encode(
        self,
        video: Any,
        chunk: int,
        *,
        dtype: Any = jnp.float32,
        algorithm: Algorithm = "direct",
        alike: bool = False,
        start: Callable[[Any], jax.Array] | None = None,
        given: jax.Array | None = None,
        tile: int = 0,
    ) -> tuple[jax.Array, jax.Array]:
        """Encodes a video to the moments of its latents, not normalised.

        Args:
            video: (B, 4n + 1, H, W, 3) in [-1, 1], H and W multiples of s (else ValueError); or any pytree
                with the same first two axes, which ``start`` converts to that.
            chunk: latent frames (four video frames each) per piece after the first frame.
            dtype: dtype of the activations; norms and sums are in float32.
            algorithm: the form of the convolutions: ``winograd`` for the CPU, ``direct`` elsewhere.
            alike: whether the first frame is padded to a piece of the length of all others.
            start: applied to each piece of the video before it is encoded, e.g. from uint8 to [-1, 1]. It
                must work frame by frame. The last piece may be filled with frames of zeros.
            given: int32 scalar, at least one; only so many frames are encoded and the rest of the result is
                meaningless, so images and videos of several lengths share one program.
            tile: the side of tiles; 0 for none. Not on a mesh. It counts what the encoder is given: pixels,
                or patches of them, as diffusers does.

        Returns mean (the mode) and log variance (clipped to [-30, 20]), float32 (B, z, n + 1, H / s, W / s).
        """
        T, H, W = (jax.eval_shape(start, video) if start else video).shape[1:4]
        if T % FRAMES_PER_LATENT != 1 or H % self.spatial or W % self.spatial:
            raise ValueError(
                f"a video to encode has 4n+1 frames and multiples of {self.spatial} pixels, not {(T, H, W)}"
            )

        def piece(
            x: Any, caches: Any, padded: jax.Array | None = None, part: Tile | None = None
        ) -> tuple[jax.Array, Any]:
            stream = Stream(caches, algorithm, columns, padded, part)
            x = start(x) if start else x
            x = x if part is None else part.take(x)
            x = (x if columns is None else columns.take(x)).astype(dtype)
            y = self.encoder(x if self.patch_size is None else patchify(x, self.patch_size), stream)
            return self.quant_conv(y, jnp.float32), tuple(stream.caches)

        rest = (T - 1) // FRAMES_PER_LATENT

        def encode(video: Any, part: Tile | None = None) -> jax.Array:
            run = piece if part is None else functools.partial(piece, part=part)
            return by_pieces(run, video, chunk * FRAMES_PER_LATENT, rest, alike, given)[0]

        columns = Columns.of(W // self.spatial)
        side = tile * (self.patch_size or 1) // self.spatial
        if (tiles := Tiles.of(H // self.spatial, W // self.spatial, side)) is not None:
            moments = tiles.joined(lambda part: encode(video, part))
        else:
            moments = encode(video) if columns is None else columns.run(encode, video, 1)
        mean, logvar = jnp.split(jnp.moveaxis(moments, -1, 1), 2, axis=1)
        return mean, jnp.clip(logvar, -30.0, 20.0)
