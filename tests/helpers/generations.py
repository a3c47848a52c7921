"""Manifests of toys and generations of published models, as plans have them: no weights are written."""

from __future__ import annotations

from typing import Any

from wanbuild.build_options import BuildOptions
from wanbuild.plan.planned_generation import PlannedGeneration
from wanbuild.plan.published_model import model_manifest, published_manifest, published_names
from wanbuild.programs.shape import Shape
from wanbuild.targets.chips import CHIPS
from wanbuild.toy.toy_configs import TOY_VARIANTS
from wanbuild.variants.table import variants
from wanrun.artifact.manifest import Manifest


def toy_manifest(variant: str) -> Manifest:
    """The manifest of a toy, as its conversion writes it but for files and checksums."""
    toy = TOY_VARIANTS[variant]
    return model_manifest(variants()[variant], toy.configs, toy.index.get("boundary_ratio"))


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
