"""The steps of a chunk of Helios, of which each stage but the first doubles the rows and columns before.

Source: diffusers' HeliosScheduler, HeliosDMDScheduler and HeliosPyramidPipeline; one stage is that of
HeliosPipeline. Every stage starts again: without history, at its own range of timesteps, with noise levels
from 0.999 to 0.

The draws of a chunk, in order: the noise of its full size, which is ``halved`` for the first stage, and for
each further stage the values of ``block_noise``. Steps draw none: those of a distilled model add the stage's
own first sample again.
"""

from __future__ import annotations

__all__ = ["block_noise", "chunk_table", "enlarged", "halved"]

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from wanrun.artifact.manifest import Manifest
from wanrun.denoising.solvers import SOLVERS, SolverTable, StageStart
from wanrun.errors import UsageError, field

TRAIN = 1000
"""Timesteps of the training."""

TOP = 0.999
"""The noise level at which a stage begins, before any shift."""

BLOCK = 2
"""Rows and columns of the blocks in which noise is correlated: those of a patch."""

RIDGE = 1e-8
"""The reference's addition to the blocks' variance, whose least eigenvalue is 0 at the published gamma."""

_SHIFTS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {"exponential": math.exp, "linear": lambda mu: mu}
)


def chunk_table(
    solver: str,
    steps: Sequence[int],
    tokens: int,
    shift: str | None = None,
    gamma: float = 1 / 3,
    flow_shift: float = 1.0,
) -> SolverTable:
    """Computes the steps of a chunk, those of one stage after the other. The sigmas are float64.

    Args:
        solver: ``unipc``, ``euler``, or ``dmd`` for a distilled model.
        steps: of each stage, the smallest size first; of a single stage, those of HeliosPipeline.
        tokens: of the chunk at its full size, by which noise levels are shifted.
        shift: how they are: ``exponential``, ``linear``, or None for not at all.
        gamma: the negative covariance of block noise, above 0 and at most 1/3.
        flow_shift: a further shift; 1 for that of the reference.

    Raises:
        UsageError: if the solver is another, a stage has no steps, or the shift is not positive.
    """
    if (rows := _ROWS.get(solver)) is None:
        raise UsageError(
            "invalid_value", "no solver of chunks", expected=", ".join(_ROWS), found=repr(solver)
        )
    if min(steps) < 1:
        raise UsageError(
            "out_of_range", "the number of steps is too small", expected="at least 1", found=min(steps)
        )
    if not (math.isfinite(flow_shift) and flow_shift > 0):
        raise UsageError(
            "out_of_range", "the flow shift is out of range", expected="a positive number", found=flow_shift
        )
    if len(steps) == 1:
        sigmas, timesteps = _plain_grid(steps[0], _factor(shift, tokens, flow_shift))
        return _joined(solver, [(sigmas, timesteps, rows(sigmas))], [StageStart(0)])
    levels, ranges = _ranges(len(steps), gamma)
    parts, starts, done = [], [], 0
    for index, (count, ends, level) in enumerate(zip(steps, ranges, levels, strict=True)):
        halvings = len(steps) - 1 - max(index - 1, 0)  # the reference counts before it enlarges
        factor = _factor(shift, tokens // BLOCK ** (2 * halvings), flow_shift)
        sigmas, timesteps = _stage_grid(count, ends, factor, distilled=solver == "dmd")
        whole = np.trunc(timesteps)  # as the pipeline of several stages does
        if solver == "dmd":  # its scheduler takes the noise level whose timestep is the nearest
            sigmas = np.append(sigmas[np.abs(timesteps - whole[:, None]).argmin(axis=1)], 0.0)
        parts.append((sigmas, whole, rows(sigmas)))
        starts.append(StageStart(done, *(_weights(level, gamma) if index else ())))
        done += count
    return _joined(solver, parts, starts)


def chunk_schedule(options: Mapping[str, Any], manifest: Manifest) -> SolverTable | None:
    """Returns the table of a chunk that has the options' steps in each stage; None for other models.

    Raises UsageError for explicit timesteps, and as ``chunk_table``.
    """
    model, chunks = manifest.model, manifest.model.chunks
    if chunks is None or (pyramid := chunks.pyramid) is None:
        return None
    for name in ("timesteps", "coefficients"):
        if options.get(name) is not None:
            raise UsageError(
                "unsupported",
                f"{field(name)} cannot be used by {model.variant}",
                remedy="pass a number of steps",
            )
    cells = (options[name] // model.vae_spatial for name in ("width", "height"))
    tokens, steps = chunks.each * math.prod(cells) // BLOCK**2, (options["num_steps"],) * pyramid.stages
    shift = float(options["flow_shift"])
    return _cached(options["solver"], steps, tokens, pyramid.shift, pyramid.gamma, shift)


_cached = lru_cache(maxsize=16)(chunk_table)


def _joined(
    solver: str, stages: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], starts: Sequence[StageStart]
) -> SolverTable:
    """Returns the table of stages, each of sigmas (N + 1,), timesteps (N,) and rows (N, 8)."""
    sigmas = [one[:-1] for one, _, _ in stages]
    table = [np.column_stack([one, rows]) for one, (_, _, rows) in zip(sigmas, stages, strict=True)]
    timesteps = np.concatenate([one for _, one, _ in stages]).astype(np.float32)
    return SolverTable(
        solver,
        timesteps,
        np.concatenate(table).astype(np.float32),
        np.append(np.concatenate(sigmas), 0.0),
        np.zeros(len(timesteps), np.float32),
        starts=tuple(starts),
    )


def _factor(shift: str | None, tokens: int, flow_shift: float) -> float | None:
    """Returns the shift for a number of tokens, as ``calculate_shift``; None for none."""
    if shift is None:
        return None if flow_shift == 1 else flow_shift
    (few, low), (many, high) = (256, 0.5), (4096, 1.15)
    slope = (high - low) / (many - few)
    return flow_shift * _SHIFTS[shift](tokens * slope + (low - slope * few))


def _shifted(sigmas: np.ndarray, factor: float | None) -> np.ndarray:
    if factor is None:
        return sigmas
    with np.errstate(divide="ignore"):
        return factor / (factor + (1 / sigmas - 1))


def _plain_grid(steps: int, factor: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns sigmas (N + 1,) and timesteps (N,) of HeliosPipeline."""
    sigmas = _shifted(np.append(np.linspace(TOP, 0.0, steps + 1)[:-1], 0.0), factor)
    return sigmas, sigmas[:-1] * TRAIN


def _stage_grid(
    steps: int, ends: tuple[float, float], factor: float | None, distilled: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns sigmas (N + 1,) and timesteps (N,) of a stage between two timesteps, the first one higher."""
    levels = np.linspace(TOP, 0, TRAIN + 1)
    count = steps + distilled  # a distilled model leaves out the last of one more
    sigmas = np.append(np.linspace(levels[0], levels[-2], count)[:steps], 0.0)
    if factor is None:
        return sigmas, np.linspace(*ends, count)[:steps]
    sigmas = _shifted(sigmas, factor)
    return sigmas, ends[1] + sigmas[:-1] * (ends[0] - ends[1])


def _ranges(stages: int, gamma: float) -> tuple[list[float], list[tuple[float, float]]]:
    """Returns each stage's first noise level in the whole flow, and its first and last timestep."""
    # Stages have shares of the timesteps like the distances that they go.
    levels = np.append(np.flip(1.0 - np.linspace(1, 1 / TRAIN, TRAIN + 1))[:-1], 0.0)
    places = [int(stage / stages * TRAIN) for stage in range(stages)] + [TRAIN]
    starts = [float(levels[place]) for place in places]
    distances = [
        (starts[0] if not index else 1 - _weights(start, gamma)[0] * (1 - start)) - starts[index + 1]
        for index, start in enumerate(starts[:-1])
    ]
    timesteps, total, ranges = levels[:-1] * TRAIN, sum(distances), []
    for index in range(stages):
        first = int(sum(distances[:index]) / total * TRAIN)
        last = TRAIN - 1 if index == stages - 1 else int(sum(distances[: index + 1]) / total * TRAIN)
        whole = np.linspace(min(timesteps[first], TRAIN - 1), timesteps[last], TRAIN + 1)
        ranges.append((float(whole[0]), float(whole[-2])))
    return starts[:-1], ranges


def _weights(level: float, gamma: float) -> tuple[float, float]:
    """Returns the weights of enlarged latents and of block noise where a stage begins at a noise level."""
    # Noise that was enlarged and block noise together are noise without covariance.
    signal = 1 - level
    kept = 1 / (math.sqrt(1 + (1 / gamma)) * (1 - signal) + signal)
    return kept, kept * (1 - signal) / math.sqrt(gamma)


def _held_rows(sigmas: np.ndarray) -> np.ndarray:
    """Returns the rows of steps after which the stage's first sample is the noise: ``last`` holds it."""
    first, held = (1.0, 0.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0, 0.0)
    return np.array(
        [
            (*(held if step else first), following, 1 - following, 0.0)
            for step, following in enumerate(sigmas[1:])
        ]
    )


_ROWS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {"unipc": SOLVERS["unipc"].rows, "euler": SOLVERS["euler"].rows, "dmd": _held_rows}
)


def halved(noise: np.ndarray) -> np.ndarray:
    """Returns noise (..., h, w) of half the rows and columns, as (..., h / 2, w / 2), and of its variance."""
    blocks = noise.reshape(*noise.shape[:-2], noise.shape[-2] // 2, 2, noise.shape[-1] // 2, 2)
    return blocks.mean(axis=(-3, -1), dtype=np.float32) * np.float32(2)


def block_noise(
    draw: Callable[[Sequence[int]], np.ndarray], shape: Sequence[int], gamma: float = 1 / 3
) -> np.ndarray:
    """Draws noise whose values have the covariance -gamma within each block.

    The values drawn are those of ``torch.randn(blocks, 4)``, each block's in order of its rows. The reference
    factors the covariance in float32, in which the ridge is lost: at the published gamma that fails on CPUs,
    and the last pivot is what rounding makes it on a GPU. Here it is float64's, 2e-4.

    Args:
        draw: returns the next standard normal array of a shape.
        shape: (..., h, w), in whole blocks.
        gamma: the covariance's size.

    Returns:
        float32 of this shape.
    """
    rows, columns = shape[-2] // BLOCK, shape[-1] // BLOCK
    values = draw((*shape[:-2], rows, columns, BLOCK**2))
    noise, below, squares = np.empty_like(values), np.zeros_like(values[..., 0]), 0.0
    for place in range(BLOCK**2):  # all values of the factor below a pivot are the same
        pivot = math.sqrt(1 + RIDGE - squares)
        factor = (-gamma - squares) / pivot
        noise[..., place] = np.float32(pivot) * values[..., place] + below
        below += np.float32(factor) * values[..., place]
        squares += factor**2
    return np.swapaxes(noise.reshape(*shape[:-2], rows, columns, BLOCK, BLOCK), -3, -2).reshape(shape)


def enlarged(
    latents: np.ndarray,
    start: StageStart,
    draw: Callable[[Sequence[int]], np.ndarray],
    gamma: float = 1 / 3,
) -> np.ndarray:
    """Returns a stage's first latents, (..., 2 h, 2 w), of the latents (..., h, w) of the one before.

    Args:
        latents: of the stage before.
        start: of the stage.
        draw, gamma: as of ``block_noise``.
    """
    whole = latents.repeat(2, axis=-2).repeat(2, axis=-1)
    noise = block_noise(draw, whole.shape, gamma)
    return np.float32(start.kept) * whole + np.float32(start.noise) * noise
