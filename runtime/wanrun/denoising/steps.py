"""The steps of a generation: which expert makes which, their parameters, and the calls of the loop's program.

The high-noise expert makes those down to the boundary, the low-noise one those below it.
"""

from __future__ import annotations

__all__ = ["TABLES", "ExpertRange"]

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from wanrun.artifact.guiders import GUIDERS, SKIPPED_LAYERS
from wanrun.artifact.manifest import TRANSFORMERS, Manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.roles import FORMS, Form, RoleName
from wanrun.denoising.blending import Blending
from wanrun.denoising.guided_steps import guided_steps, skipping_steps
from wanrun.denoising.pyramid import chunk_schedule
from wanrun.denoising.solvers import COLUMNS, SolverTable, StageStart, solver_table
from wanrun.denoising.state import State
from wanrun.errors import UsageError, field
from wanrun.timing.timings import Timings
from wanrun.weights.loras import AppliedLora

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a step's inputs, by name."""

_NONE: Shapes = MappingProxyType({})

TABLES: Mapping[str, str] = MappingProxyType(
    {
        "coefficients": "coefficients",
        "timestep": "timesteps",
        "next_timestep": "next_timesteps",
        "guidance_scale": "guidance_scales",
        "guidance_projection": "guidance_projections",
        "skip_scale": "skip_scales",
        "skip_layers": "skip_layers",
    }
)
"""The inputs that differ by step, of a program of one step, with their tables in that of several."""


@dataclass(frozen=True)
class ExpertRange:
    """Consecutive steps of one expert.

    Attributes:
        transformer: the expert.
        first: number of its first step.
        last: one past the last one.
        guidance_scales: of each of them; 1: the step makes one pass, without the negative prompt.
        guider: combines the passes of the others.
        skip_scales: of each step, how far its velocity is led away from that of a pass without
            ``skip_layers``; 0: there is no such pass. Empty for a guider that skips none.
        skip_layers: numbers of the layers that such passes leave out.
    """

    transformer: str
    first: int
    last: int
    guidance_scales: tuple[float, ...]
    guider: str = "cfg"
    skip_scales: tuple[float, ...] = ()
    skip_layers: tuple[int, ...] = ()

    @classmethod
    def alike(
        cls, transformer: str, first: int, last: int, guidance_scale: float, **guidance: Any
    ) -> ExpertRange:
        """Returns steps that all have one scale; ``guidance`` has further attributes."""
        return cls(transformer, first, last, (guidance_scale,) * (last - first), **guidance)

    def part(self, first: int, last: int) -> ExpertRange:
        """Returns the steps that are in the range."""
        within = slice(first - self.first, last - self.first)
        guidance_scales, skip_scales = self.guidance_scales[within], self.skip_scales[within]
        return replace(self, first=first, last=last, guidance_scales=guidance_scales, skip_scales=skip_scales)

    @property
    def guided(self) -> int:
        """How many of the steps make a second pass."""
        return sum(scale != 1 for scale in self.guidance_scales)

    @property
    def skipping(self) -> int:
        """How many of the steps make a third pass."""
        return sum(scale != 0 for scale in self.skip_scales)


def transformers(manifest: Manifest) -> tuple[str, ...]:
    """Returns the names of an artifact's transformers, the high-noise one first."""
    return tuple(name for name in TRANSFORMERS if name in manifest.components)


def expert_ranges(
    table: SolverTable, names: Sequence[str], options: Mapping[str, Any], num_train_timesteps: int
) -> tuple[ExpertRange, ...]:
    """Returns the experts' ranges of a denoising loop in order: one or two, none of them empty.

    The high-noise expert, the first of ``names``, takes the steps whose timestep is at least boundary x
    num_train_timesteps, compared in float32 like the reference (diffusers' WanPipeline).

    The options are ``guidance_scale``; with two transformers also ``guidance_scale_2``, of the low-noise
    expert, and ``boundary``; ``GUIDED``, where not all steps have guidance; ``guider`` and its own options,
    where it is not ``cfg``.
    """
    total = len(table.timesteps)
    start, end = guided_steps(options, total)
    guided = range(max(start, options.get("zero_steps", 0)), end)
    skipping = skipping_steps(options, total)

    def part(name: str, first: int, last: int, scale: str) -> ExpertRange:
        scales = tuple(options[scale] if index in guided else 1.0 for index in range(first, last))
        found = ExpertRange(name, first, last, scales, options.get("guider", "cfg"))
        if not skipping:
            return found
        steps = enumerate(scales, first)
        skips = tuple(options["skip_scale"] if at in skipping and one != 1 else 0.0 for at, one in steps)
        return replace(found, skip_scales=skips, skip_layers=tuple(options["skip_layers"]))

    if len(names) == 1:
        return (part(names[0], 0, total, "guidance_scale"),)
    boundary = np.float32(options["boundary"] * num_train_timesteps)
    high = int(np.count_nonzero(table.timesteps >= boundary))
    both = part(names[0], 0, high, "guidance_scale"), part(names[1], high, total, "guidance_scale_2")
    return tuple(one for one in both if one.first < one.last)


_table = lru_cache(maxsize=16)(solver_table)  # the lines of a prompts file mostly have the same


def schedule(options: Mapping[str, Any], manifest: Manifest) -> tuple[SolverTable, tuple[ExpertRange, ...]]:
    """Returns the solver table of a generation with resolved options, and the experts' ranges.

    The steps are the explicit ``timesteps``; if those are absent or None, the solver's own grid for
    ``num_steps`` and ``flow_shift``. Those of a fitted schedule have ``coefficients``. With a ``strength``
    the first steps are left out. Raises UsageError if the solver has no such table.
    """
    num_train_timesteps = manifest.model.num_train_timesteps
    solver, steps, shift = options["solver"], options["num_steps"], options["flow_shift"]
    timesteps = None if (given := options.get("timesteps")) is None else tuple(given)
    fitted = None if (given := options.get("coefficients")) is None else tuple(map(tuple, given))
    strength = options.get("strength")
    if (table := chunk_schedule(options, manifest)) is None:
        table = _table(solver, steps, shift, num_train_timesteps, timesteps, fitted, strength)
    if zero_steps := max(options.get("zero_steps", 0) - table.skipped, 0):
        table = _without_velocity(table, zero_steps)
    options = {**options, "zero_steps": zero_steps}
    return table, expert_ranges(table, transformers(manifest), options, num_train_timesteps)


def opening(
    options: Mapping[str, Any], manifest: Manifest
) -> tuple[SolverTable, tuple[ExpertRange, ...]] | None:
    """Returns ``schedule`` of the first chunk of a video, if it has other steps than those after it."""
    chunks = manifest.model.chunks
    if chunks is None or chunks.pyramid is None or not chunks.pyramid.doubled:
        return None
    return schedule({**options, "num_steps": 2 * options["num_steps"]}, manifest)


def _without_velocity(table: SolverTable, steps: int) -> SolverTable:
    """Returns a table whose first steps take the velocity for 0: their prediction is the latents."""
    coefficients = table.coefficients.copy()
    coefficients[:steps, COLUMNS.index("sigma")] = 0
    return replace(table, coefficients=coefficients)


def explicit_timesteps(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> list[float] | None:
    """Returns a generation's explicit timesteps; None if it uses the solver's own grid.

    They are the given timesteps, or else the manifest's defaults, which a distilled model has. But another
    number of steps, solver or shift than the manifest's selects the solver's own grid and drops the default
    timesteps. An option that is absent or None is not given. Raises UsageError if the given number of steps
    differs from the number of timesteps.
    """
    timesteps, steps = given.get("timesteps"), given.get("num_steps")
    if timesteps is None:
        deciding = ("num_steps", "solver", "flow_shift")
        if any(given.get(name) not in (None, defaults.get(name)) for name in deciding):
            return None
        timesteps = defaults.get("timesteps")
    elif steps not in (None, len(timesteps)):
        raise UsageError(
            "conflict",
            f"{field('num_steps')} and {field('timesteps')} contradict each other",
            expected=f"{len(timesteps)} steps, one for each timestep",
            found=steps,
            remedy=f"leave {field('num_steps')} out",
        )
    return None if timesteps is None else [float(timestep) for timestep in timesteps]


OnState = Callable[[int, int, State], None]


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Denoising:
    """One generation's parameters of the denoising loop, shared by all of its windows.

    Attributes:
        embeddings: (P, 512, text_dim), the positive prompt first; the negative one's only if a step has
            guidance, or NAG is on.
        behind: called, more than once, when the next stage may start to load during the steps.
        on_step: called after each program call with the number of steps done, the total, and the state.
        maker: the role whose program makes all steps; None for those that the form of the loop has.
        blending: the windows of every step; None where the programs take the whole video.
        check: called as frames leave the decoder; what it raises ends the generation.
        last: whether no other generation follows: the experts are released after their last step.
        opening: table and ranges of the first window, where it has more steps than those after it.
        longer: how many more.
        chunks: latent frames of each chunk; empty for those of a video of the profile, or no chunks.
    """

    table: SolverTable
    ranges: Sequence[ExpertRange]
    embeddings: np.ndarray
    loop: str
    timings: Timings
    behind: Callable[[], None] = _nothing
    on_step: OnState = _nothing
    window: int = 0
    windows: int = 1
    maker: RoleName | None = None
    loras: Sequence[AppliedLora] = ()
    blending: Blending | None = None
    check: Callable[[], object] = _nothing
    last: bool = False
    opening: tuple[SolverTable, Sequence[ExpertRange]] | None = None
    longer: int = 0
    chunks: Sequence[int] = ()

    @property
    def opened(self) -> Denoising:
        """The parameters of this window."""
        if self.opening is None or self.window:
            return self
        table, ranges = self.opening
        return replace(self, table=table, ranges=ranges, opening=None)

    @property
    def form(self) -> Form:
        """The form of the loop."""
        return FORMS[self.loop]

    @property
    def place(self) -> str | None:
        """Which of several windows or clips is made, in words."""
        return f"part {self.window + 1} of {self.windows}" if self.windows > 1 else None

    def maker_of(self, step: int) -> RoleName:
        """Returns the role whose program makes a step."""
        return self.maker or self.form.maker(step)

    def reached(self, step: int) -> tuple[int, int]:
        """Returns how many steps of all windows are done after some of this window's, and how many are."""
        longer = self.longer
        steps = len(self.table.timesteps) - (0 if self.window else longer)
        before = self.window * steps + (longer if self.window else 0)
        return before + step, self.windows * steps + longer


@dataclass(frozen=True)
class Call:
    """One call of the loop's program: its inputs, its first step, and one past its last step.

    ``noise`` is the weight of the noise added to the latents after the call; None if none is drawn. After the
    last step it may be 0, and the noise is still drawn: see ``Solver.draws_last``.
    """

    arguments: Mapping[str, Any]
    first: int
    last: int
    noise: float | None = None


def calls(
    run: Denoising, steps: ExpertRange, profile: Profile, guiding: Shapes, flow_map: bool
) -> Iterator[Call]:
    """Yields the calls of an expert's steps in the form of the loop; arguments as of ``step_calls``."""
    given = run.table, steps
    if run.form.looped:
        rows = profile.options.max_steps
        return scan_calls(*given, rows, profile.guidance, guiding, flow_map, run.blending is not None)
    return step_calls(*given, profile.guidance, guiding, flow_map)


def step_calls(
    table: SolverTable, steps: ExpertRange, guidance: bool, guiding: Shapes = _NONE, flow_map: bool = False
) -> Iterator[Call]:
    """Yields one call per step, so that progress can be shown and Ctrl-C takes effect between steps.

    The program takes scales if ``guidance``, what ``guiding`` says for the guiders that it was built for (see
    ``inputs_of``), and the timestep at which a step ends if ``flow_map``.
    """
    rows = _rows(table, steps, guidance, guiding, flow_map)
    for index in range(steps.first, steps.last):
        arguments = {name: column[index] for name, column in rows.items()}
        yield Call(arguments, index, index + 1, table.noise_after(index))


def scan_calls(
    table: SolverTable,
    steps: ExpertRange,
    max_steps: int,
    guidance: bool,
    guiding: Shapes = _NONE,
    flow_map: bool = False,
    single: bool = False,
) -> Iterator[Call]:
    """Yields one call for all steps; one per step if ``single``, or if the solver adds noise after each.

    ``max_steps`` are the rows in the program's tables; the other arguments are those of ``step_calls``.
    """
    columns = _rows(table, steps, guidance, guiding, flow_map)
    rows = {TABLES[name]: _padded(column, max_steps) for name, column in columns.items()}
    length = 1 if single or table.noise.any() else steps.last - steps.first
    for first in range(steps.first, steps.last, length):
        last = first + length
        arguments = {**rows, "first": np.int32(first), "last": np.int32(last)}
        yield Call(arguments, first, last, table.noise_after(last - 1))


def _rows(
    table: SolverTable, steps: ExpertRange, guidance: bool, guiding: Shapes, flow_map: bool
) -> dict[str, np.ndarray]:
    """Returns the inputs that differ by step, with a row for each; scales of other experts are not read."""
    rows = {"coefficients": table.coefficients, "timestep": table.timesteps}
    if flow_map:
        rows["next_timestep"] = table.next_timesteps
    if not guidance:
        return rows
    total, own = len(table.timesteps), slice(steps.first, steps.last)
    rows["guidance_scale"] = np.ones(total, np.float32)
    rows["guidance_scale"][own] = steps.guidance_scales
    for name, shape in guiding.items():
        rows[name] = np.zeros((total, *shape), np.float32)
        if name in GUIDERS[steps.guider].inputs:
            rows[name][own] = _guided_by(steps, name, shape)
    return rows


def _guided_by(steps: ExpertRange, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the values that the guider of these steps gives an input, for each step."""
    if name == SKIPPED_LAYERS:
        return np.isin(np.arange(*shape), steps.skip_layers)
    if name == "skip_scale" and steps.skip_scales:
        return np.array(steps.skip_scales)
    return np.full(steps.last - steps.first, name != "skip_scale")


def _padded(rows: np.ndarray, length: int) -> np.ndarray:
    """Returns the rows followed by zeros, which no step reads."""
    return np.concatenate([rows, np.zeros((length - len(rows), *rows.shape[1:]), rows.dtype)])


def velocity_table(timestep: float, stages: int = 1) -> SolverTable:
    """Returns a table of one step with σ = 1 that gives m0 = x − v, which reveals the model's output v.

    Of a chunk it has one in each of so many stages.
    """
    row = np.zeros((stages, len(COLUMNS)), np.float32)
    row[:, [COLUMNS.index("sigma"), COLUMNS.index("p_0")]] = 1
    timesteps, none = np.full(stages, timestep, np.float32), np.zeros(stages, np.float32)
    starts = tuple(map(StageStart, range(stages)))
    return SolverTable("velocity", timesteps, row, np.zeros(stages + 1), none, starts=starts)
