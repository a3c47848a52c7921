"""Small moving pictures of a video that is being made."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np

FRAME_MS: Final = 100
"""How long each latent frame is shown."""


def moving(frames: np.ndarray) -> bytes:
    """Returns frames, uint8 (T, h, w, 3), as a WebP that repeats."""
    from PIL import Image

    file, (first, *others) = io.BytesIO(), [Image.fromarray(frame) for frame in frames]
    first.save(
        file,
        "WEBP",
        save_all=True,
        append_images=others,
        duration=FRAME_MS,
        loop=0,
        quality=60,
        method=0,
    )
    return file.getvalue()
