"""What a video of chunks goes on after: an image or a video, whose chunks are encoded one by one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.params import bind
from wanbuild.variants.conditioner import FLAG, Arrays, Conditioner, signed
from wanbuild.variants.variant import Inputs, a_video, an_image, takes

_GIVEN, _COUNT = "given", "given_frames"


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
    """Returns the inputs of a variant that may go on after an image or a video.

    Args:
        frames: latent frames of the past that a chunk's steps take.
    """
    image, video = (make(_GIVEN, required=False, count=_COUNT, past=frames) for make in (an_image, a_video))
    return takes(image=image, video=video)
