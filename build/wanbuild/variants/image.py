"""I2V and FLF2V: video from a first image, or from a first and a last one (WanImageToVideoPipeline)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.variants.conditioner import FLAG, Arrays, Conditioner, mask_channels, over_pixels, signed
from wanbuild.variants.variant import TWO_EXPERTS, WITH_IMAGES, Usage, Variant, an_image, takes


class ImageConditioner(Conditioner):
    """i2v and flf2v: the first frame, and the last one if given."""

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns ``image`` and ``last_image`` uint8 (1, H, W, 3); ``has_last_image`` if that is optional."""
        arguments = {"image": self._frames(1)}
        if "last_image" in self.inputs:
            arguments["last_image"] = self._frames(1)
            if flag := self.inputs["last_image"].flag:
                arguments[flag] = FLAG
        return arguments

    def condition(self, weights: Any, media: Arrays) -> dict[str, jax.Array]:
        """Returns ``channels`` (4 + z, T, h, w): a mask of given frames, and their video filled with grey."""
        has_last = "last_image" in media and media.get("has_last_image", 1) != 0
        end = signed(media["last_image"]) if "last_image" in media else 0.0

        def given(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Returns whether a frame is the first, and whether it is a given last frame."""
            return index == 0, (index == self.num_frames - 1) & has_last

        def frames(piece: Arrays) -> jax.Array:
            first, last = map(over_pixels, given(piece["index"]))
            return jnp.where(first, signed(media["image"]), jnp.where(last, end, 0.0))

        (latents,) = self._encode(weights, {}, [frames])
        first, last = given(jnp.arange(self.num_frames))
        mask = jnp.broadcast_to((first | last)[:, None, None], self._cells(self.num_frames))
        return {"channels": jnp.concatenate([mask_channels(mask), latents])}


@dataclass(frozen=True, kw_only=True)
class ImageToVideo(Variant):
    """A variant whose video begins, and may end, with an image."""

    @property
    def conditioner(self) -> type[Conditioner]:
        return ImageConditioner

    @property
    def usages(self) -> Sequence[Usage]:
        if "last_image" not in self.inputs or self.inputs["last_image"].required:
            return super().usages
        return [("first image", {"without": ("last_image",)}), ("both images", {})]


ROWS = (
    ImageToVideo(
        name="wan2.1-i2v",
        task="i2v",
        pipeline_class="WanImageToVideoPipeline",
        components=WITH_IMAGES,
        inputs=takes(an_image("image", encoded=True)),
        condition_channels=True,
        steps=40,
    ),
    ImageToVideo(
        name="wan2.1-flf2v",
        task="flf2v",
        pipeline_class="WanImageToVideoPipeline",
        components=WITH_IMAGES,
        inputs=takes(an_image("image", encoded=True), an_image("last_image", encoded=True)),
        condition_channels=True,
        flow_shift=16.0,
        sizes=((1280, 720), (832, 480)),
    ),
    ImageToVideo(
        name="wan2.2-i2v",
        task="i2v",
        pipeline_class="WanImageToVideoPipeline",
        components=TWO_EXPERTS,
        inputs=takes(
            an_image("image"), an_image("last_image", required=False, default=0, flag="has_last_image")
        ),
        condition_channels=True,
        steps=40,
        guidance_scale=3.5,
        options=MappingProxyType({"guidance_scale_2": 3.5}),
        sizes=((1280, 720), (832, 480)),
    ),
)
