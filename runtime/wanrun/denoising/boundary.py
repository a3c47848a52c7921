"""The boundary between two experts: a share of the training timesteps, or the steps of one of them."""

from __future__ import annotations

__all__ = ["boundary_between"]

from collections.abc import Mapping
from typing import Any

from wanrun.artifact.manifest import TRANSFORMERS, Manifest
from wanrun.denoising.solvers import SolverTable
from wanrun.denoising.steps import schedule, transformers


def boundary_between(manifest: Manifest, num_steps: int, **others: Any) -> float | None:
    """Returns a boundary that gives both experts steps in a short run: the model's own, or else the middle.

    It is a share of the training timesteps; None with one transformer.

    Args:
        num_steps: denoising steps on the solver's own grid.
        others: options by name; solver and shift default to the artifact's.
    """
    if len(transformers(manifest)) == 1:
        return None
    defaults = manifest.model.default_options()
    own = defaults["boundary"]
    options = {**defaults, "timesteps": None, **others, "num_steps": num_steps}
    table, parts = schedule(options, manifest)
    middle = len(table.timesteps) // 2
    return float(own) if not middle or len(parts) == 2 else _between(table, middle, manifest)


def boundary_after(high: int, options: Mapping[str, Any], manifest: Manifest) -> float:
    """Returns the boundary that gives the high-noise expert so many steps, and the other one the rest.

    ``high`` is from 1 to one less than all steps; the options are those of ``schedule``.
    """
    return _between(schedule(options, manifest)[0], high, manifest)


def split_at(boundary: float, options: Mapping[str, Any], manifest: Manifest) -> int:
    """Returns how many steps the high-noise expert has with this boundary; options as of ``schedule``."""
    _, ranges = schedule({**options, "boundary": boundary}, manifest)
    high, *_ = TRANSFORMERS
    return sum(part.last - part.first for part in ranges if part.transformer == high)


def _between(table: SolverTable, index: int, manifest: Manifest) -> float:
    """Returns the share of the training timesteps in the middle between a step and the one before it."""
    return float(table.timesteps[index - 1 : index + 1].mean()) / manifest.model.num_train_timesteps
