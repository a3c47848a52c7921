"""Image and video inputs of the denoising loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Conditions:
    """Inputs that images and videos add to one run of the denoising loop.

    Attributes:
        prepare: inputs of the programs before an expert's steps, besides the embeddings.
        steps: inputs of every step.
        held: latents (C, 1, h, w) of a first frame that is not denoised; None if all frames are.
    """

    prepare: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, Any] = field(default_factory=dict)
    held: np.ndarray | None = None

    def finish(self, latents: np.ndarray) -> np.ndarray:
        """Returns the final latents (B, C, T, h, w), with the held first frame in its place."""
        if self.held is not None:
            latents = latents.copy()
            latents[:, :, :1] = self.held
        return latents
