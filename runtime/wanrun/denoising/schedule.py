"""Which expert takes which steps: the high-noise one down to the boundary, the low-noise one below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wanrun.artifact.manifest import TRANSFORMERS, Manifest
from wanrun.denoising.solvers import SolverTable, solver_table
from wanrun.errors import UsageError, field


@dataclass(frozen=True)
class ExpertRange:
    """Steps in a row that one expert takes.

    Attributes:
        transformer: the expert's component.
        first: index of its first step.
        last: one past its last step.
        guidance_scale: strength of its classifier-free guidance.
    """

    transformer: str
    first: int
    last: int
    guidance_scale: float


def transformers(manifest: Manifest) -> tuple[str, ...]:
    """The transformers that an artifact has, the high-noise one first."""
    return tuple(name for name in TRANSFORMERS if name in manifest.components)


def expert_ranges(
    table: SolverTable,
    names: Sequence[str],
    boundary: float | None,
    guidance_scale: float,
    guidance_scale_2: float | None,
    num_train_timesteps: int,
) -> tuple[ExpertRange, ...]:
    """The experts' ranges of a denoising loop, in order: one or two, never an empty one.

    The high-noise expert takes the steps whose timestep is at least boundary x num_train_timesteps, compared
    in float32 as the reference does (diffusers' WanPipeline).

    Args:
        table: the solver's, its timesteps falling.
        names: the transformers, the high-noise one first.
        boundary: share of the training timesteps; None with one transformer.
        guidance_scale: of the high-noise expert, or the only one.
        guidance_scale_2: of the low-noise expert; None with one transformer.
        num_train_timesteps: the timestep of pure noise.
    """
    total = len(table.timesteps)
    if len(names) == 1:
        return (ExpertRange(names[0], 0, total, guidance_scale),)
    assert boundary is not None and guidance_scale_2 is not None  # as resolved options have them
    high = int(np.count_nonzero(table.timesteps >= np.float32(boundary * num_train_timesteps)))
    both = (
        ExpertRange(names[0], 0, high, guidance_scale),
        ExpertRange(names[1], high, total, guidance_scale_2),
    )
    return tuple(part for part in both if part.first < part.last)


def schedule(options: Mapping[str, Any], manifest: Manifest) -> tuple[SolverTable, tuple[ExpertRange, ...]]:
    """The solver's table of a generation whose options are resolved, and who takes which of its steps.

    Args:
        options: explicit ``timesteps`` are the steps. Without them, or where they are None, the steps are the
            solver's own for ``num_steps`` and ``flow_shift``.
        manifest: the artifact's manifest.

    Raises:
        UsageError: if the solver has no such table.
    """
    num_train_timesteps = manifest.model["num_train_timesteps"]
    table = solver_table(
        options["solver"],
        options["num_steps"],
        options["flow_shift"],
        num_train_timesteps,
        options.get("timesteps"),
    )
    parts = expert_ranges(
        table,
        transformers(manifest),
        options.get("boundary"),
        options["guidance_scale"],
        options.get("guidance_scale_2"),
        num_train_timesteps,
    )
    return table, parts


def explicit_timesteps(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> list[float] | None:
    """The explicit timesteps of a generation; None where the solver's own grid is used.

    Those that are given, else the manifest's default ones, which a distilled model has. But a given number of
    steps, solver or shift asks for that solver's own grid: it drops the default timesteps.

    Args:
        defaults: of the manifest.
        given: options by name; one that is absent or None was not given.

    Raises:
        UsageError: if another number of steps is given than timesteps.
    """
    timesteps, steps = given.get("timesteps"), given.get("num_steps")
    if timesteps is None:
        if any(given.get(name) is not None for name in ("num_steps", "solver", "flow_shift")):
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
    """A boundary that gives each expert steps of a short run: the model's own if it does, else their middle.

    Args:
        manifest: an artifact's manifest.
        steps: denoising steps on the solver's own grid.
        others: options by name; the artifact's default solver and shift where they are not among them.

    Returns:
        The share of the training timesteps; None with one transformer.
    """
    names, own = transformers(manifest), manifest.model["boundary_ratio"]
    if len(names) == 1:
        return None
    options = {**manifest.model["defaults"], "timesteps": None, "boundary": own, **others, "num_steps": steps}
    table, parts = schedule(options, manifest)
    if steps == 1 or len(parts) == 2:
        return float(own)
    middle = steps // 2
    return float(table.timesteps[middle - 1 : middle + 1].mean()) / manifest.model["num_train_timesteps"]
