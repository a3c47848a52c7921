"""What images and videos condition the transformer with: the functions of the program ``encode_video``.

Frames come as uint8 and become [-1, 1] piece by piece, inside the VAE's loop over time, so that no video
is ever held in float32. What a task encodes (the image of the character, a pose video, the two halves of
a masked video) goes through one encoder in turn: one graph to compile, and the memory of one.

The tasks are those of diffusers' pipelines: WanImageToVideoPipeline (i2v, flf2v, ti2v), WanVACEPipeline
and WanAnimatePipeline. T is latent frames and F video frames, F = 4 (T - 1) + 1; H and W are pixels, h
and w latent cells.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from wanbuild.models.convolution import Algorithm
from wanbuild.models.params import bind
from wanbuild.models.vae import FRAMES_PER_LATENT, WanVAE
from wanbuild.models.vae_config import VAEConfig
from wanrun.generation.conditioning import PREVIOUS_FRAMES

_FLAG = jax.ShapeDtypeStruct((), jnp.int32)

_Arrays = Mapping[str, jax.Array]

_Source = Callable[[_Arrays], jax.Array]
"""From a piece of a task's media, (1, n, ...) each, to frames (1, n, H, W, 3) in [-1, 1]."""


@dataclass(frozen=True, eq=False)
class Conditioner(ABC):
    """The ``encode_video`` of one task; ``CONDITIONERS`` has the class of each.

    Args:
        module: the abstract VAE.
        config: its configuration.
        inputs: the media that the task takes, and whether each is ``required``, as in the manifest.
        width: pixels.
        height: pixels.
        num_frames: F.
        num_references: reference images of VACE.
        chunk: latent frames encoded at a time.
        dtype: compute dtype of the VAE.
        algorithm: the form of its convolutions.
    """

    module: WanVAE
    config: VAEConfig
    inputs: Mapping[str, str]
    width: int
    height: int
    num_frames: int
    num_references: int = 0
    chunk: int = 1
    dtype: Any = jnp.float32
    algorithm: Algorithm = "direct"

    def __call__(self, weights: Any, **media: jax.Array) -> dict[str, Any]:
        """Runs the program.

        Args:
            weights: the VAE's.
            media: what ``arguments`` lists.

        Returns:
            ``condition``: the task's arrays by name, float32, latents normalised, without a batch axis.
        """
        return {"condition": self.condition(weights, media)}

    @abstractmethod
    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The program's inputs after the VAE's weights."""

    @abstractmethod
    def condition(self, weights: Any, media: _Arrays) -> dict[str, jax.Array]:
        """The task's arrays from the inputs by name."""

    def _frames(self, count: int, dtype: Any = jnp.uint8, channels: tuple[int, ...] = (3,)) -> Any:
        return jax.ShapeDtypeStruct((count, self.height, self.width, *channels), dtype)

    def _cells(self, *leading: int) -> tuple[int, ...]:
        """(..., h, w)."""
        return (*leading, self.height // self.config.spatial, self.width // self.config.spatial)

    def _encode(
        self,
        weights: Any,
        media: _Arrays,
        videos: Sequence[_Source],
        images: Sequence[_Source] = (),
        alike: jax.Array | None = None,
    ) -> list[jax.Array]:
        """Encodes videos and images, one after the other.

        Args:
            weights: the VAE's.
            media: arrays (F, ...); sources are given their pieces, and as ``index`` the frames' numbers.
            videos: sources of whole videos.
            images: sources of which only the first frame is taken.
            alike: bool scalar: where it is true all videos are the same, and only the first is encoded.

        Returns:
            The normalised latents of each: (z, T, h, w) of a video, (z, 1, h, w) of an image.
        """
        vae = bind(self.module, weights)
        mean, std = (
            jnp.asarray(values, jnp.float32)[:, None, None, None]
            for values in (self.config.latents_mean, self.config.latents_std)
        )
        sources = [*videos, *images]
        video = {name: array[None] for name, array in media.items()}
        video["index"] = jnp.arange(self.num_frames if videos else 1)[None]

        def encode(number: jax.Array) -> jax.Array:
            only_first = number >= len(videos) if videos and images else None
            if alike is not None:
                only_first = (number >= len(videos)) | (alike & (number > 0))
            mode, _ = vae.encode(
                video,
                self.chunk,
                dtype=self.dtype,
                algorithm=self.algorithm,
                start=lambda piece: lax.switch(number, sources, piece),
                only_first=only_first,
            )
            # The reference multiplies by a rounded 1/std.
            return (mode[0] - mean) * (1.0 / std)

        if len(sources) == 1:
            return [encode(jnp.int32(0))]
        latents = lax.map(encode, jnp.arange(len(sources)))
        whole = latents[: len(videos)]
        if alike is not None:
            whole = jnp.where(alike, whole[:1], whole)
        return [*whole, *latents[len(videos) :, :, :1]]


class ImageConditioner(Conditioner):
    """i2v and flf2v: the first frame, and the last one if it is given."""

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """``image`` and ``last_image`` uint8 (1, H, W, 3); ``has_last_image`` where that is optional."""
        arguments = {"image": self._frames(1)}
        if "last_image" in self.inputs:
            arguments["last_image"] = self._frames(1)
            if self.inputs["last_image"] == "optional":
                arguments["has_last_image"] = _FLAG
        return arguments

    def condition(self, weights: Any, media: _Arrays) -> dict[str, jax.Array]:
        """``channels`` (4 + z, T, h, w): which frames are given, and the video of them and of grey."""
        has_last = "last_image" in media and media.get("has_last_image", 1) != 0
        end = _signed(media["last_image"]) if "last_image" in media else 0.0

        def given(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Whether a frame is the first, and whether it is the last and given."""
            return index == 0, (index == self.num_frames - 1) & has_last

        def frames(piece: _Arrays) -> jax.Array:
            first, last = map(_over_pixels, given(piece["index"]))
            return jnp.where(first, _signed(media["image"]), jnp.where(last, end, 0.0))

        (latents,) = self._encode(weights, {}, [frames])
        first, last = given(jnp.arange(self.num_frames))
        mask = jnp.broadcast_to((first | last)[:, None, None], self._cells(self.num_frames))
        return {"channels": jnp.concatenate([_mask_channels(mask), latents])}


class FirstFrameConditioner(Conditioner):
    """ti2v: the first latent frame."""

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """``image`` uint8 (1, H, W, 3)."""
        return {"image": self._frames(1)}

    def condition(self, weights: Any, media: _Arrays) -> dict[str, jax.Array]:
        """``first_frame`` (z, 1, h, w)."""
        (latents,) = self._encode(weights, {}, [], [_still(media["image"][0])])
        return {"first_frame": latents}


class ControlConditioner(Conditioner):
    """vace: a video that is made anew where a mask is on, and reference images."""

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """``video`` and ``mask`` uint8 (F, H, W, 3), ``has_video``, ``references`` float32 (R, H, W, 3)."""
        video = self._frames(self.num_frames)
        arguments = {"video": video, "mask": video, "has_video": _FLAG}
        if self.num_references:
            arguments["references"] = self._frames(self.num_references, jnp.float32)
        return arguments

    def condition(self, weights: Any, media: _Arrays) -> dict[str, jax.Array]:
        """``control`` (2 z + s², R + T, h, w): what stays, what is made anew, and the mask.

        The mask has s² channels, one for each pixel of a cell. Without a video all of it is to be made.
        """
        has_video = media["has_video"] != 0

        def half(masked: bool) -> _Source:
            def source(piece: _Arrays) -> jax.Array:
                # Above a half of 255, in each colour for itself.
                kept = has_video & ((piece["mask"] > 127) == masked)
                return jnp.where(kept, _signed(piece["video"]), 0.0)

            return source

        inactive, reactive, *references = self._encode(
            weights,
            {"video": media["video"], "mask": media["mask"]},
            [half(False), half(True)],
            [_still(media["references"][number]) for number in range(self.num_references)],
            alike=~has_video,
        )
        mask = jnp.where(has_video, self._mask(media["mask"]), 1.0)
        control = jnp.concatenate([inactive, reactive, mask])
        for latents in references:  # each goes in front of those before it
            rest = jnp.zeros((len(control) - len(latents), *latents.shape[1:]))
            control = jnp.concatenate([jnp.concatenate([latents, rest]), control], 1)
        return {"control": control}

    def _mask(self, mask: jax.Array) -> jax.Array:
        """uint8 (F, H, W, 3) to (s², T, h, w), of the first colour."""
        T, cell = (self.num_frames - 1) // FRAMES_PER_LATENT + 1, self.config.spatial
        # The frame at the middle of each of T parts of the video, which is never between two frames.
        middles = (2 * np.arange(T) + 1) * self.num_frames // (2 * T)
        values = (_signed(mask[middles, ..., 0]) + 1) / 2
        values = values.reshape(T, self.height // cell, cell, self.width // cell, cell)
        return values.transpose(2, 4, 0, 1, 3).reshape(self._cells(cell**2, T))


class SegmentConditioner(Conditioner):
    """animate: a character, its poses, and what the segment shows beside it; one segment of a video."""

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Media of the segment, the end of the one before, and flags.

        ``image`` uint8 (1, H, W, 3), ``pose_video`` and ``background_video`` uint8 (F, H, W, 3),
        ``mask_video`` uint8 (F, H, W), ``previous`` float32 (PREVIOUS_FRAMES, H, W, 3) in [-1, 1], of which
        the last ``overlap`` count; ``later``: whether there is a segment before; ``replace``: whether the
        character takes somebody's place in the background video.
        """
        video = self._frames(self.num_frames)
        return {
            "image": self._frames(1),
            "pose_video": video,
            "background_video": video,
            "mask_video": self._frames(self.num_frames, channels=()),
            "previous": self._frames(PREVIOUS_FRAMES, jnp.float32),
            "overlap": _FLAG,
            "later": _FLAG,
            "replace": _FLAG,
        }

    def condition(self, weights: Any, media: _Arrays) -> dict[str, jax.Array]:
        """``channels`` (4 + z, 1 + T, h, w), the character in front, and ``pose`` (z, T, h, w).

        The first frames of a later segment are the last of the one before. The others are the background's
        where a character is replaced, else grey.
        """
        overlap, replace = media["overlap"], media["replace"] != 0
        held = jnp.where(media["later"] != 0, overlap, 0)

        def shown(piece: _Arrays) -> jax.Array:
            index = piece["index"]
            past = jnp.take(media["previous"], index + (PREVIOUS_FRAMES - overlap), axis=0, mode="clip")
            rest = jnp.where(replace, _signed(piece["background"]), 0.0)
            return jnp.where(_over_pixels(index < held), past, rest)

        latents, pose, character = self._encode(
            weights,
            {"pose": media["pose_video"], "background": media["background_video"]},
            [shown, lambda piece: _signed(piece["pose"])],
            [_still(media["image"][0])],
        )
        cell = self.config.spatial
        mask = 1 - media["mask_video"][:, ::cell, ::cell].astype(jnp.float32) / 255
        mask = jnp.where(replace, mask, 0.0)
        mask = jnp.where((jnp.arange(self.num_frames) < held)[:, None, None], 1.0, mask)
        video = jnp.concatenate([_mask_channels(mask), latents])
        image = jnp.concatenate([jnp.ones(self._cells(FRAMES_PER_LATENT, 1)), character])
        return {"channels": jnp.concatenate([image, video], 1), "pose": pose}


CONDITIONERS: Mapping[str, type[Conditioner]] = MappingProxyType(
    {
        "i2v": ImageConditioner,
        "flf2v": ImageConditioner,
        "ti2v": FirstFrameConditioner,
        "vace": ControlConditioner,
        "animate": SegmentConditioner,
    }
)
"""By the manifest's task."""


def _still(image: jax.Array) -> _Source:
    """Shows an image (H, W, 3), uint8 or in [-1, 1], in every frame."""

    def source(piece: _Arrays) -> jax.Array:
        frame = _signed(image) if image.dtype == jnp.uint8 else image
        return jnp.broadcast_to(frame, (*piece["index"].shape, *frame.shape))

    return source


def _signed(pixels: jax.Array) -> jax.Array:
    """uint8 to float32 in [-1, 1]."""
    return 2.0 * (pixels.astype(jnp.float32) / 255.0) - 1.0


def _over_pixels(frames: jax.Array) -> jax.Array:
    """(1, n) to (1, n, 1, 1, 1)."""
    return frames[..., None, None, None]


def _mask_channels(mask: jax.Array) -> jax.Array:
    """(F, h, w) to float32 (4, T, h, w): the frames of a latent side by side, the first one four times."""
    first = jnp.repeat(mask[:1], FRAMES_PER_LATENT, 0)
    groups = jnp.concatenate([first, mask[1:]]).astype(jnp.float32)
    return jnp.moveaxis(groups.reshape(-1, FRAMES_PER_LATENT, *mask.shape[1:]), 1, 0)
