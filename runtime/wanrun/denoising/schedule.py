"""Assigns steps to experts: the high-noise one down to the boundary, the low-noise one below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from wanrun.artifact.manifest import TRANSFORMERS, Manifest
from wanrun.denoising.solvers import SolverTable, solver_table
from wanrun.errors import UsageError, field


@dataclass(frozen=True)
class ExpertRange:
    """Consecutive steps of one expert.

    ``last`` is one past the last step.
    """

    transformer: str
    first: int
    last: int
    guidance_scale: float


def transformers(manifest: Manifest) -> tuple[str, ...]:
    """Returns the names of an artifact's transformers, the high-noise one first."""
    return tuple(name for name in TRANSFORMERS if name in manifest.components)


def expert_ranges(
    table: SolverTable, names: Sequence[str], options: Mapping[str, Any], num_train_timesteps: int
) -> tuple[ExpertRange, ...]:
    """Returns the experts' ranges of a denoising loop in order: one or two, none of them empty.

    The high-noise expert takes the steps whose timestep is at least boundary x num_train_timesteps, compared
    in float32 like the reference (diffusers' WanPipeline).

    Args:
        table: the solver's table, with decreasing timesteps.
        names: the transformers, the high-noise one first.
        options: ``guidance_scale``; with two transformers also ``guidance_scale_2``, of the low-noise expert,
            and ``boundary``.
    """
    total = len(table.timesteps)
    if len(names) == 1:
        return (ExpertRange(names[0], 0, total, options["guidance_scale"]),)
    boundary = np.float32(options["boundary"] * num_train_timesteps)
    high = int(np.count_nonzero(table.timesteps >= boundary))
    both = (
        ExpertRange(names[0], 0, high, options["guidance_scale"]),
        ExpertRange(names[1], high, total, options["guidance_scale_2"]),
    )
    return tuple(part for part in both if part.first < part.last)


_table = lru_cache(maxsize=16)(solver_table)  # the lines of a prompts file mostly have the same


def schedule(options: Mapping[str, Any], manifest: Manifest) -> tuple[SolverTable, tuple[ExpertRange, ...]]:
    """Returns the solver table of a generation with resolved options, and the experts' ranges.

    Args:
        options: the steps are the explicit ``timesteps``; if those are absent or None, the solver's own grid
            for ``num_steps`` and ``flow_shift``. Those of a fitted schedule have ``coefficients``.

    Raises:
        UsageError: if the solver has no such table.
    """
    num_train_timesteps = manifest.model.num_train_timesteps
    solver, steps, shift = options["solver"], options["num_steps"], options["flow_shift"]
    timesteps = None if (given := options.get("timesteps")) is None else tuple(given)
    fitted = None if (given := options.get("coefficients")) is None else tuple(map(tuple, given))
    table = _table(solver, steps, shift, num_train_timesteps, timesteps, fitted)
    return table, expert_ranges(table, transformers(manifest), options, num_train_timesteps)


def explicit_timesteps(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> list[float] | None:
    """Returns a generation's explicit timesteps; None if it uses the solver's own grid.

    They are the given timesteps, or else the manifest's defaults, which a distilled model has. But another
    number of steps, solver or shift than the manifest's selects the solver's own grid and drops the default
    timesteps. An option that is absent or None is not given.

    Raises:
        UsageError: if the given number of steps differs from the number of timesteps.
    """
    timesteps, steps = given.get("timesteps"), given.get("num_steps")
    if timesteps is None:
        deciding = ("num_steps", "solver", "flow_shift")
        if any(given.get(name) not in (None, defaults.get(name)) for name in deciding):
            return None
        timesteps = defaults.get("timesteps")
    elif steps not in (None, len(timesteps)):
        raise UsageError(
            f"{field('num_steps')} and {field('timesteps')} contradict each other",
            expected=f"{len(timesteps)} steps, one for each timestep",
            found=steps,
            remedy=f"leave {field('num_steps')} out",
        )
    return None if timesteps is None else [float(timestep) for timestep in timesteps]


def boundary_between(manifest: Manifest, steps: int, **others: Any) -> float | None:
    """Returns a boundary that gives both experts steps in a short run: the model's own, or else the middle.

    It is a share of the training timesteps; None with one transformer.

    Args:
        steps: denoising steps on the solver's own grid.
        others: options by name; solver and shift default to the artifact's.
    """
    if len(transformers(manifest)) == 1:
        return None
    defaults = manifest.model.default_options()
    own = defaults["boundary"]
    options = {**defaults, "timesteps": None, **others, "num_steps": steps}
    table, parts = schedule(options, manifest)
    if steps == 1 or len(parts) == 2:
        return float(own)
    middle = steps // 2
    return float(table.timesteps[middle - 1 : middle + 1].mean()) / manifest.model.num_train_timesteps
