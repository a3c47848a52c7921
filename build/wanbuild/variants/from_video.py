"""Videos that begin with another one.

Video to video: the steps begin with a video's latents and noise (WanVideoToVideoPipeline). A video of chunks
continues an image or a video, whose chunks are encoded one by one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from msgspec.structs import replace

from wanbuild.models.params import bind
from wanbuild.variants.conditioner import FLAG, Arrays, Conditioner, signed
from wanbuild.variants.variant import Inputs, a_video, an_image, takes
from wanrun import Manifest

OPTION = "video"
"""The option of a start video."""

_ARRAY = "start_video"
_GIVEN, _COUNT = "given", "given_frames"


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


class PastFrames(Conditioner):
    """The distribution of the latents of a chunk, or of fewer of its frames."""

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns ``given`` uint8 (F, H, W, 3), and ``given_frames``, how many of them count."""
        return {_GIVEN: self._frames(self.num_frames), _COUNT: FLAG}

    def condition(self, weights: Any, media: Arrays) -> dict[str, jax.Array]:
        """Returns ``mean`` and ``deviation`` (z, T, h, w), normalised."""
        mean, factor = self._statistics
        mode, log_variance = bind(self.module, weights).encode(
            media[_GIVEN][None],
            self.chunk,
            dtype=self.dtype,
            algorithm=self.algorithm,
            alike=self.alike,
            start=signed,
            given=media[_COUNT],
        )
        return {"mean": (mode[0] - mean) * factor, "deviation": jnp.exp(0.5 * log_variance[0]) * factor}


def goes_on_after(frames: int) -> Inputs:
    """Returns the inputs of a variant that may continue an image or a video.

    ``frames`` are latent frames of the past that a chunk's steps take.
    """
    image, video = (make(_GIVEN, required=False, count=_COUNT, past=frames) for make in (an_image, a_video))
    return takes(image=image, video=video)
