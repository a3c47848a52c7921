"""Image and video conditions of the transformer: the functions of the program ``encode_video``.

Frames come as uint8 and become [-1, 1] piece by piece, inside the VAE's loop over time, so no video is ever
held in float32. A variant's inputs (the image of the character, a pose video, the two halves of a masked
video) go through one encoder in turn: one graph to compile, and the memory of one encoder.

The modules of this package have a conditioner for each kind of variant, equivalent to diffusers' pipelines.
T is latent frames and F video frames, F = 4 (T - 1) + 1; H and W are pixels, h and w latent cells.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from wanbuild.models.convolution import Algorithm
from wanbuild.models.params import bind
from wanbuild.models.vae import FRAMES_PER_LATENT, WanVAE
from wanbuild.models.vae_config import VAEConfig
from wanrun.artifact.media import MediaOption
from wanrun.artifact.task import Input

FLAG = jax.ShapeDtypeStruct((), jnp.int32)

Arrays = Mapping[str, jax.Array]

Source = Callable[[Arrays], jax.Array]
"""Maps a piece of the media, (1, n, ...) each, to frames (1, n, H, W, 3) in [-1, 1]."""


@dataclass(frozen=True, eq=False)
class Conditioner(ABC):
    """The program ``encode_video`` of one kind of variant.

    Args:
        num_frames: F.
        num_references: reference images of VACE.
        chunk: latent frames encoded at a time.
        dtype: compute dtype of the VAE.
        alike: whether all pieces of a video are alike, the first frame too.
        tile: the side of the VAE's tiles; 0 for none.
    """

    module: WanVAE
    config: VAEConfig
    inputs: Mapping[MediaOption, Input]
    width: int
    height: int
    num_frames: int
    num_references: int = 0
    chunk: int = 1
    dtype: Any = jnp.float32
    algorithm: Algorithm = "direct"
    alike: bool = False
    tile: int = 0

    def __call__(self, weights: Any, **media: jax.Array) -> dict[str, Any]:
        """Runs the program with the VAE's weights on the inputs that ``arguments`` lists.

        Returns ``condition``: the arrays by name, float32, latents normalised, without a batch axis.
        """
        return {"condition": self.condition(weights, media)}

    @abstractmethod
    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the program's inputs after the VAE's weights."""

    @abstractmethod
    def condition(self, weights: Any, media: Arrays) -> dict[str, jax.Array]:
        """Computes the condition's arrays from the inputs by name."""

    def _frames(self, count: int, dtype: Any = jnp.uint8, channels: tuple[int, ...] = (3,)) -> Any:
        return jax.ShapeDtypeStruct((count, self.height, self.width, *channels), dtype)

    def _cells(self, *leading: int) -> tuple[int, ...]:
        """(..., h, w)."""
        return (*leading, self.height // self.config.spatial, self.width // self.config.spatial)

    @property
    def _statistics(self) -> tuple[jax.Array, jax.Array]:
        """The mean of latents (z, T, h, w) and the factor of their deviations, which normalise them."""
        mean, std = (
            jnp.asarray(values, jnp.float32)[:, None, None, None]
            for values in (self.config.latents_mean, self.config.latents_std)
        )
        return mean, 1.0 / std  # rounded, as the reference has it

    def _encode(
        self,
        weights: Any,
        media: Arrays,
        videos: Sequence[Source],
        images: Sequence[Source] = (),
        alike: jax.Array | None = None,
        given: jax.Array | None = None,
    ) -> list[jax.Array]:
        """Returns the normalised latents of videos, (z, T, h, w), and of images, (z, 1, h, w)."""
        # Sources get pieces of the media's arrays (F, ...), and the frame numbers as `index`; of images only
        # the first frame. `alike`, a bool scalar: all videos are equal, and only the first is encoded.
        # `given`, an int32 scalar: so many frames of the only video are encoded.
        vae = bind(self.module, weights)
        mean, factor = self._statistics
        sources = [*videos, *images]
        video = {name: array[None] for name, array in media.items()}
        video["index"] = jnp.arange(self.num_frames if videos else 1)[None]

        def encode(number: jax.Array) -> jax.Array:
            first = number >= len(videos) if videos and images else None
            if alike is not None:
                first = (number >= len(videos)) | (alike & (number > 0))
            mode, _ = vae.encode(
                video,
                self.chunk,
                dtype=self.dtype,
                algorithm=self.algorithm,
                alike=self.alike,
                start=lambda piece: lax.switch(number, sources, piece),
                given=given if first is None else jnp.where(first, 1, self.num_frames),
                tile=self.tile,
            )
            return (mode[0] - mean) * factor

        if len(sources) == 1:
            return [encode(jnp.int32(0))]
        latents = lax.map(encode, jnp.arange(len(sources)))
        whole = latents[: len(videos)]
        if alike is not None:
            whole = jnp.where(alike, whole[:1], whole)
        return [*whole, *latents[len(videos) :, :, :1]]


def still(image: jax.Array) -> Source:
    """Returns a source that shows an image (H, W, 3), uint8 or in [-1, 1], in every frame."""

    def source(piece: Arrays) -> jax.Array:
        frame = signed(image) if image.dtype == jnp.uint8 else image
        return jnp.broadcast_to(frame, (*piece["index"].shape, *frame.shape))

    return source


def signed(pixels: jax.Array) -> jax.Array:
    """Converts uint8 to float32 in [-1, 1]."""
    return 2.0 * (pixels.astype(jnp.float32) / 255.0) - 1.0


def over_pixels(frames: jax.Array) -> jax.Array:
    """Reshapes (1, n) to (1, n, 1, 1, 1)."""
    return frames[..., None, None, None]


def mask_channels(mask: jax.Array) -> jax.Array:
    """(F, h, w) to float32 (4, T, h, w): a latent frame's frames as channels, the first one four times."""
    first = jnp.repeat(mask[:1], FRAMES_PER_LATENT, 0)
    groups = jnp.concatenate([first, mask[1:]]).astype(jnp.float32)
    return jnp.moveaxis(groups.reshape(-1, FRAMES_PER_LATENT, *mask.shape[1:]), 1, 0)
