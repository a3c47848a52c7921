"""What a generation returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wanrun.timing import Timings


@dataclass(frozen=True)
class Result:
    """What one generation made.

    Args:
        frames: uint8 (B, T, H, W, 3).
        latents: final latents, float32 (B, C, T, h, w), normalised.
        options: prompt, seed, solver and everything else that was used, for the video's metadata.
        timings: what this generation took, with what was loaded meanwhile; or what ``generate`` was given to
            record into.
    """

    frames: np.ndarray
    latents: np.ndarray
    options: Mapping[str, Any]
    timings: Timings
