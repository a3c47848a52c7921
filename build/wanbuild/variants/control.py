"""VACE: a video and its mask control the result, with reference images (WanVACEPipeline)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from wanbuild.models.vae import FRAMES_PER_LATENT
from wanbuild.variants.conditioner import FLAG, Arrays, Conditioner, Source, signed, still
from wanbuild.variants.variant import TEXT_TO_VIDEO, Components, Field, Usage, Variant, a_video, takes
from wanrun.artifact.task import Input
from wanrun.media.inputs import Media


class ControlConditioner(Conditioner):
    """vace: a video that is generated anew under its mask, and reference images."""

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """``video`` and ``mask`` uint8 (F, H, W, 3), ``has_video``, ``references`` float32 (R, H, W, 3)."""
        video = self._frames(self.num_frames)
        arguments = {"video": video, "mask": video, "has_video": FLAG}
        if self.num_references:
            arguments["references"] = self._frames(self.num_references, jnp.float32)
        return arguments

    def condition(self, weights: Any, media: Arrays) -> dict[str, jax.Array]:
        """Returns ``control`` (2 z + s², R + T, h, w): the kept part, the part to generate, and the mask.

        The mask has s² channels, one for each pixel of a cell. Without a video everything is generated.
        """
        has_video = media["has_video"] != 0

        def half(masked: bool) -> Source:
            def source(piece: Arrays) -> jax.Array:
                # The threshold is half of 255, for each colour separately.
                kept = has_video & ((piece["mask"] > 127) == masked)
                return jnp.where(kept, signed(piece["video"]), 0.0)

            return source

        inactive, reactive, *references = self._encode(
            weights,
            {"video": media["video"], "mask": media["mask"]},
            [half(False), half(True)],
            [still(media["references"][number]) for number in range(self.num_references)],
            alike=~has_video,
        )
        mask = jnp.where(has_video, self._mask(media["mask"]), 1.0)
        control = jnp.concatenate([inactive, reactive, mask])
        for latents in references:  # each goes in front of the previous ones
            rest = jnp.zeros((len(control) - len(latents), *latents.shape[1:]))
            control = jnp.concatenate([jnp.concatenate([latents, rest]), control], 1)
        return {"control": control}

    def _mask(self, mask: jax.Array) -> jax.Array:
        """Converts uint8 (F, H, W, 3) to (s², T, h, w); only the first colour counts."""
        T, cell = (self.num_frames - 1) // FRAMES_PER_LATENT + 1, self.config.spatial
        # The frame in the middle of each of T parts of the video, which never falls between two frames.
        middles = (2 * np.arange(T) + 1) * self.num_frames // (2 * T)
        values = (signed(mask[middles, ..., 0]) + 1) / 2
        values = values.reshape(T, self.height // cell, cell, self.width // cell, cell)
        return values.transpose(2, 4, 0, 1, 3).reshape(self._cells(cell**2, T))


@dataclass(frozen=True, kw_only=True)
class Control(Variant):
    """A variant controlled by a video."""

    reference_videos: ClassVar[int | None] = 1

    @property
    def conditioner(self) -> type[Conditioner]:
        return ControlConditioner

    def channel_fields(self, latent_channels: int) -> list[Field]:
        """The control channels are the kept part of the video, the part to generate, and an unfolded mask."""
        control = 2 * latent_channels + self.vae_spatial**2
        return [*super().channel_fields(latent_channels), ("vace_in_channels", control, 96)]

    def step_arguments(self, transformer: Any, frames: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns ``conditioning_scale`` float32 (control blocks,)."""
        blocks = len(transformer.vace_layers)
        return {"conditioning_scale": jax.ShapeDtypeStruct((blocks,), jnp.float32)}

    def reference_arguments(self, media: Media, numbers: Mapping[str, Any]) -> dict[str, Any]:
        given = super().reference_arguments(media, numbers)
        if "reference_image" in given:
            given["reference_images"] = list(given.pop("reference_image"))
        return given

    @property
    def usages(self) -> Sequence[Usage]:
        return [("no video", {"without": ("video", "mask")}), ("video", {})]


_EXPERT = ("diffusers.WanVACETransformer3DModel",)
_ONE: Components = MappingProxyType({**TEXT_TO_VIDEO, "transformer": _EXPERT})
_INPUTS = takes(
    a_video("video", required=False, prepare="resize_same_aspect", default=0, flag="has_video"),
    a_video("mask", required=False, beside="video", default=255),
    reference_image=Input(kind="images", array="references", prepare="fit_on_white"),
)

ROWS = (
    Control(
        name="wan2.1-vace",
        task="vace",
        pipeline_class="WanVACEPipeline",
        components=_ONE,
        inputs=_INPUTS,
        options=MappingProxyType({"conditioning_scale": 1.0}),
        flow_shift=16.0,
        sizes=((1280, 720), (832, 480)),
    ),
    Control(  # VACE-Fun-A14B; the defaults are those of its example
        name="wan2.2-vace",
        task="vace",
        pipeline_class="WanVACEPipeline",
        components=MappingProxyType({**_ONE, "transformer_2": _EXPERT}),
        inputs=_INPUTS,
        options=MappingProxyType({"conditioning_scale": 1.0, "guidance_scale_2": 5.0}),
        flow_shift=12.0,
    ),
)
