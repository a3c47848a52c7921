"""The result of a generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wanrun.timing import Timings


@dataclass(frozen=True)
class Result:
    """The result of one generation.

    Args:
        frames: uint8 (B, F, H, W, 3).
        latents: final latents, float32 (B, C, T, h, w), normalised; of the last window if there are several.
        options: prompt, seed, solver and all other options of the generation, for the video's metadata.
        timings: times of this generation and of the loading during it; the ``timings`` argument of
            ``generate`` if one was passed.
    """

    frames: np.ndarray
    latents: np.ndarray
    options: Mapping[str, Any]
    timings: Timings
