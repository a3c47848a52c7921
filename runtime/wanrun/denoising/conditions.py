"""Image and video inputs of the denoising loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wanrun.denoising.past import Given
from wanrun.denoising.solvers import SolverTable


@dataclass(frozen=True)
class Conditions:
    """Inputs that images and videos add to one run of the denoising loop.

    Attributes:
        prepare: inputs of the programs before an expert's steps, besides the embeddings.
        steps: inputs of every step.
        held: latents (C, T, h, w) of the first frames, which are not denoised; None if all frames are.
        start: latents (C, T, h, w) of a video that the steps begin with; None for only noise.
        given: what the video goes on after; None for nothing.
    """

    prepare: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, Any] = field(default_factory=dict)
    held: np.ndarray | None = None
    start: np.ndarray | None = None
    given: Given | None = None

    def first_sample(self, noise: np.ndarray, table: SolverTable) -> np.ndarray:
        """Returns the sample that the steps begin with, float32: noise, or a video at the first noise level.

        ``noise``, float32 (B, C, T, h, w), is only read.
        """
        if self.start is None:
            return noise * np.float32(table.start)
        sigma = np.float32(table.sigmas[0])
        return (1 - sigma) * self.start + sigma * noise

    def finish(self, latents: np.ndarray) -> np.ndarray:
        """Returns the final latents (B, C, T, h, w), with the held first frames in their place."""
        if self.held is not None:
            latents = latents.copy()
            latents[:, :, : self.held.shape[1]] = self.held
        return latents
