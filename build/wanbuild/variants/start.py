"""Video to video: the steps begin with a video's latents and noise (WanVideoToVideoPipeline)."""

from __future__ import annotations

from typing import Any

import jax
from msgspec.structs import replace

from wanbuild.variants.conditioner import Arrays, Conditioner, signed
from wanbuild.variants.variant import a_video
from wanrun import Manifest

OPTION = "video"
"""The option of the video."""

_ARRAY = "start_video"


class VideoStart(Conditioner):
    """The latents of a video: the mode of their distribution, normalised."""

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns ``start_video`` uint8 (F, H, W, 3)."""
        return {_ARRAY: self._frames(self.num_frames)}

    def condition(self, weights: jax.Array, media: Arrays) -> dict[str, jax.Array]:
        """Returns ``start`` (z, T, h, w)."""
        (latents,) = self._encode(weights, media, [lambda piece: signed(piece[_ARRAY])])
        return {"start": latents}


def with_start(manifest: Manifest, built: bool) -> dict[str, Any]:
    """Returns the manifest's field ``model``; its task has a video to begin with if ``built``, else none.

    ``built`` is whether one of the artifact's profiles is built for such a video.
    """
    model, task = manifest.model, manifest.model.task
    video = {OPTION: a_video(_ARRAY, required=False)} if built else {}
    others = {name: item for name, item in task.inputs.items() if name != task.start}
    task = replace(task, inputs={**others, **video}, start=OPTION if built else None)
    return {"model": replace(model, task=task)}
