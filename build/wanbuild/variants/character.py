"""Animate: a character that moves like a person in a video or replaces them (WanAnimatePipeline)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from msgspec import structs

from wanbuild.models.animate_config import AnimateConfig
from wanbuild.models.vae import FRAMES_PER_LATENT
from wanbuild.variants.conditioner import (
    FLAG,
    Arrays,
    Conditioner,
    mask_channels,
    over_pixels,
    signed,
    still,
)
from wanbuild.variants.variant import (
    CHANNELS,
    WITH_IMAGES,
    Field,
    Inputs,
    Usage,
    Variant,
    a_video,
    an_image,
    takes,
)
from wanrun.artifact.task import Modes, Windows
from wanrun.media.inputs import Media

MODES = Modes(names=("animate", "replace"), array="replace")

PREVIOUS_FRAMES = 5
"""Frames of the previous window that ``encode_video`` takes; the last of them may be used."""


class CharacterConditioner(Conditioner):
    """Conditions one window: the character, its poses, and the rest of the picture."""

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the window's media, the end of the previous window, and flags.

        ``image`` uint8 (1, H, W, 3), ``pose_video`` and ``background_video`` uint8 (F, H, W, 3),
        ``mask_video`` uint8 (F, H, W), ``previous`` float32 (PREVIOUS_FRAMES, H, W, 3) in [-1, 1], whose last
        ``overlap`` frames count; ``later``: whether there is a previous window; ``replace``: whether the
        character replaces a person in the background video.
        """
        video = self._frames(self.num_frames)
        return {
            "image": self._frames(1),
            "pose_video": video,
            "background_video": video,
            "mask_video": self._frames(self.num_frames, channels=()),
            "previous": self._frames(PREVIOUS_FRAMES, jnp.float32),
            "overlap": FLAG,
            "later": FLAG,
            "replace": FLAG,
        }

    def condition(self, weights: Any, media: Arrays) -> dict[str, jax.Array]:
        """Returns ``channels`` (4 + z, 1 + T, h, w), the character in front, and ``pose`` (z, T, h, w).

        A later window begins with the last frames of the previous one. The other frames are the background
        video if the character replaces somebody, else grey.
        """
        overlap, replace = media["overlap"], media["replace"] != 0
        held = jnp.where(media["later"] != 0, overlap, 0)

        def shown(piece: Arrays) -> jax.Array:
            index = piece["index"]
            past = jnp.take(media["previous"], index + (PREVIOUS_FRAMES - overlap), axis=0, mode="clip")
            rest = jnp.where(replace, signed(piece["background"]), 0.0)
            return jnp.where(over_pixels(index < held), past, rest)

        latents, pose, character = self._encode(
            weights,
            {"pose": media["pose_video"], "background": media["background_video"]},
            [shown, lambda piece: signed(piece["pose"])],
            [still(media["image"][0])],
        )
        cell = self.config.spatial
        mask = 1 - media["mask_video"][:, ::cell, ::cell].astype(jnp.float32) / 255
        mask = jnp.where(replace, mask, 0.0)
        mask = jnp.where((jnp.arange(self.num_frames) < held)[:, None, None], 1.0, mask)
        video = jnp.concatenate([mask_channels(mask), latents])
        image = jnp.concatenate([jnp.ones(self._cells(FRAMES_PER_LATENT, 1)), character])
        return {"channels": jnp.concatenate([image, video], 1), "pose": pose}


@dataclass(frozen=True, kw_only=True)
class Character(Variant):
    """A variant that animates a character, window by window."""

    @property
    def conditioner(self) -> type[Conditioner]:
        return CharacterConditioner

    def channel_fields(self, latent_channels: int) -> list[Field]:
        in_channels = ("in_channels", self.in_channels(latent_channels), AnimateConfig.in_channels)
        return [in_channels, ("latent_channels", latent_channels, CHANNELS)]

    def inputs_for(self, transformer: Any) -> Inputs:
        """The motion encoder takes square faces."""
        face = structs.replace(self.inputs["face_video"], size=transformer.motion_encoder_size)
        return {**self.inputs, "face_video": face}

    def prepare_arguments(self, transformer: Any, num_frames: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns ``face_video`` uint8 (F, S, S, 3)."""
        size = transformer.motion_encoder_size
        return {"face_video": jax.ShapeDtypeStruct((num_frames, size, size, 3), jnp.uint8)}

    def reference_arguments(self, media: Media, numbers: Mapping[str, Any]) -> dict[str, Any]:
        given = super().reference_arguments(media, numbers)
        given["segment_frame_length"] = given.pop("num_frames")
        assert self.windows is not None
        given["prev_segment_conditioning_frames"] = media.segment_overlap or self.windows.overlaps[0]
        given["mode"] = media.mode or MODES.names[0]
        return given

    @property
    def usages(self) -> Sequence[Usage]:
        return [(mode, {"mode": mode}) for mode in MODES.names]


ROWS = (
    Character(
        name="wan2.2-animate",
        task="animate",
        pipeline_class="WanAnimatePipeline",
        components=MappingProxyType(
            {**WITH_IMAGES, "transformer": ("diffusers.WanAnimateTransformer3DModel",)}
        ),
        inputs=takes(
            an_image("image", prepare="fit_on_black", encoded=True),
            a_video("pose_video"),
            a_video("face_video"),
            a_video("background_video", mode="replace", default=0),
            a_video("mask_video", mode="replace", prepare="greyscale", default=0),
        ),
        modes=MODES,
        windows=Windows(
            frames_of="pose_video", overlaps=(1, PREVIOUS_FRAMES), carried={"previous": "last_frames"}
        ),
        condition_channels=True,
        leading_latents=1,
        steps=20,
        guidance_scale=1.0,
        fps=30,
        sizes=((1280, 720), (832, 480)),
        num_frames=77,
    ),
)
