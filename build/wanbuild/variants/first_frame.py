"""TI2V: video from text, optionally with a first image, whose latent frame is held; a timestep per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.variants.conditioner import Arrays, Conditioner, still
from wanbuild.variants.variant import TEXT_TO_VIDEO, Usage, Variant, an_image, takes
from wanrun.artifact.task import HeldFrame


class FirstFrameConditioner(Conditioner):
    """ti2v: the first latent frame."""

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns ``image`` uint8 (1, H, W, 3)."""
        return {"image": self._frames(1)}

    def condition(self, weights: Any, media: Arrays) -> dict[str, jax.Array]:
        """Returns ``first_frame`` (z, 1, h, w)."""
        (latents,) = self._encode(weights, {}, [], [still(media["image"][0])])
        return {"first_frame": latents}


@dataclass(frozen=True, kw_only=True)
class FirstFrame(Variant):
    """A variant whose first latent frame may be given."""

    @property
    def conditioner(self) -> type[Conditioner]:
        return FirstFrameConditioner

    def step_arguments(self, transformer: Any, frames: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns ``frame_mask`` float32 (T,): zero for a held frame."""
        return {"frame_mask": jax.ShapeDtypeStruct((frames,), jnp.float32)}

    @property
    def reference_class(self) -> str:
        return "WanImageToVideoPipeline"

    @property
    def usages(self) -> Sequence[Usage]:
        return [("text", {"without": ("image",)}), ("image", {})]


ROWS = (
    FirstFrame(
        name="wan2.2-ti2v",
        task="ti2v",
        pipeline_class="WanPipeline",
        also_saved_as=("WanImageToVideoPipeline",),
        components=TEXT_TO_VIDEO,
        inputs=takes(an_image("image", required=False)),
        held=HeldFrame(condition="condition", latents="first_frame", mask="frame_mask"),
        expand_timesteps=True,
        from_video=True,
        fps=24,
        sizes=((1280, 704), (704, 1280)),
        num_frames=121,
        vae_spatial=16,
    ),
)
