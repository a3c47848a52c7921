"""Generations of published models, as plans have them: nothing is read but published figures."""

from __future__ import annotations

from typing import Any

from wanbuild.build_options import BuildOptions
from wanbuild.plan.planned_generation import PlannedGeneration
from wanbuild.plan.published_model import published_manifest, published_names
from wanbuild.programs.shape import Shape
from wanbuild.targets.chips import CHIPS


def generation(
    name: str,
    chip: str = "h200",
    size: tuple[int, int] = (832, 480),
    frames: int = 81,
    *,
    guidance: bool = True,
    **options: Any,
) -> PlannedGeneration:
    """A published model's 40 steps of a video on a chip; ``options`` are those of the build."""
    manifest, shape = published_manifest(published_names()[name]), Shape(*size, frames, 1, guidance)
    return PlannedGeneration(manifest, shape, BuildOptions(**options), CHIPS[chip], 40)
