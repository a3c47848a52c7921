"""Step caches as they are published: rules that say at which steps the model is not asked.

Each rule is asked before a step, in a run by UniPC's own grid. Where it says so, an earlier velocity stands
in for the model's. The papers keep the output of the blocks, or of the model without its input; the velocity
itself was never worse on these checkpoints, and needs no change of a program. Signals and constants that a
paper takes from a model are those of the model at hand. Sources: TeaCache (arXiv 2411.19108), MagCache
(2506.09045), EasyCache (2507.02860), SeaCache (2602.18993).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from wanrun.denoising.solvers import COLUMNS

Velocity = Callable[[int, np.ndarray], np.ndarray]
"""Evaluates the model: of a step's number and the latents there."""


@dataclass
class Past:
    """What a rule may look at.

    Args:
        sigmas: noise levels of the steps, and 0.
        embeddings: (N, D), the modulated embedding of each step's time.
        latents: those at which the model was asked or not, the newest last.
        velocities: those that were used, likewise.
        asked: numbers of the steps at which the model was asked.
    """

    sigmas: np.ndarray
    embeddings: np.ndarray
    latents: list[np.ndarray] = field(default_factory=list)
    velocities: list[np.ndarray] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)


class Rule(Protocol):
    """One run of a rule."""

    def skips(self, step: int, x: np.ndarray, past: Past) -> bool:
        """Whether the model is not asked at this step, which is neither the first nor the last."""
        ...


def _change(now: np.ndarray, before: np.ndarray) -> float:
    """The relative L1 distance."""
    return float(np.abs(now - before).mean() / np.abs(before).mean())


@dataclass
class TeaCache:
    """Sums the change of the time's embedding, mapped by a polynomial to that of the output.

    Args:
        threshold: of the sum, at which the model is asked.
        polynomial: coefficients, the highest power first, fitted to runs of this model.
    """

    threshold: float
    polynomial: np.ndarray
    total: float = 0.0

    def skips(self, step: int, x: np.ndarray, past: Past) -> bool:
        change = _change(past.embeddings[step], past.embeddings[step - 1])
        self.total += max(0.0, float(np.polyval(self.polynomial, change)))
        if self.total >= self.threshold:
            self.total = 0.0
        return self.total > 0


@dataclass
class MagCache:
    """Follows the ratios of the outputs' magnitudes, which are alike for all prompts.

    Args:
        threshold: of the error that a row of skips may add up to.
        ratios: (N,), of a step's magnitude to that of the step before.
    """

    threshold: float
    ratios: np.ndarray
    most: int = 4
    kept: float = 0.2
    error: float = 0.0
    ratio: float = 1.0
    row: int = 0

    def skips(self, step: int, x: np.ndarray, past: Past) -> bool:
        if step < self.kept * len(self.ratios):
            return False
        self.ratio *= float(self.ratios[step])
        self.error, self.row = self.error + abs(1 - self.ratio), self.row + 1
        if self.error < self.threshold and self.row <= self.most:
            return True
        self.error, self.ratio, self.row = 0.0, 1.0, 0
        return False


@dataclass
class EasyCache:
    """Expects the output to change with the input as it did between the last two answers of the model.

    Args:
        threshold: of the summed relative change.
    """

    threshold: float
    first: int = 6
    total: float = 0.0

    def skips(self, step: int, x: np.ndarray, past: Past) -> bool:
        if step < self.first:
            return False
        newest, before = past.asked[-1], past.asked[-2]
        moved = np.abs(past.latents[newest] - past.latents[before]).mean()
        rate = np.abs(past.velocities[newest] - past.velocities[before]).mean() / moved
        change = np.abs(x - past.latents[-1]).mean()
        self.total += float(rate * change / np.abs(past.velocities[-1]).mean())
        if self.total < self.threshold:
            return True
        self.total = 0.0
        return False


@dataclass
class SeaCache:
    """Sums the change of the latents behind a Wiener filter of natural videos, at most two skips in a row.

    Args:
        threshold: of the sum.
    """

    threshold: float
    most: int = 2
    total: float = 0.0
    row: int = 0

    def skips(self, step: int, x: np.ndarray, past: Past) -> bool:
        now = _wiener(x, float(past.sigmas[step]))
        self.total += _change(now, _wiener(past.latents[-1], float(past.sigmas[step - 1])))
        if self.total < self.threshold and self.row < self.most:
            self.row += 1
            return True
        self.total, self.row = 0.0, 0
        return False


def _wiener(x: np.ndarray, sigma: float) -> np.ndarray:
    """Filters latents (B, C, T, h, w): gains of each axis, whose product has the mean 1."""
    gain = np.ones(x.shape[2:])
    for axis, size in enumerate(x.shape[2:]):
        power = 1 / (np.abs(np.fft.fftfreq(size)) ** 3 + 1e-16)
        one = (1 - sigma) * power / ((1 - sigma) ** 2 * power + sigma**2)
        gain = gain * one.reshape([-1 if other == axis else 1 for other in range(3)])
    axes = (2, 3, 4)
    return np.asarray(np.fft.ifftn(np.fft.fftn(x, axes=axes) * (gain / gain.mean()), axes=axes).real)


@dataclass(frozen=True)
class Signals:
    """What the rules take from a model.

    Args:
        embeddings: as of ``Past``.
        polynomial: of TeaCache.
        ratios: of MagCache.
    """

    embeddings: np.ndarray
    polynomial: np.ndarray
    ratios: np.ndarray


RULES: Mapping[str, Callable[[float, Signals], Rule]] = MappingProxyType(
    {
        "TeaCache": lambda threshold, signals: TeaCache(threshold, signals.polynomial),
        "MagCache": lambda threshold, signals: MagCache(threshold, signals.ratios),
        "EasyCache": lambda threshold, signals: EasyCache(threshold),
        "SeaCache": lambda threshold, signals: SeaCache(threshold),
    }
)
"""By name, what makes a rule of a threshold."""

THRESHOLDS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "TeaCache": (0.05, 0.1, 0.2, 0.4),
        "MagCache": (0.02, 0.06, 0.12, 0.4),
        "EasyCache": (0.05, 0.1, 0.2, 0.4),
        "SeaCache": (0.1, 0.2, 0.35, 0.7),
    }
)
"""Of each rule some that ask for about two thirds to a quarter of the steps."""


def run(table: Any, start: np.ndarray, velocity: Velocity, rule: Rule | None, past: Past) -> np.ndarray:
    """Runs a solver's table with a rule; returns the clean latents. Without a rule every step asks.

    Args:
        table: a SolverTable of N steps.
        start: initial latents, float32.
        velocity: the model.
        rule: a new one.
        past: an empty one, which is filled.
    """
    x = start
    last = m1 = m2 = np.zeros_like(x)
    count = len(table.timesteps)
    for step, row in enumerate(table.coefficients):
        c = dict(zip(COLUMNS, row, strict=True))
        if rule is not None and 0 < step < count - 1 and rule.skips(step, x, past):
            v = _instead(rule, past, step)
        else:
            v = velocity(step, x)
            past.asked.append(step)
        past.latents.append(x)
        past.velocities.append(v)
        m0 = x - c["sigma"] * v
        last = c["c_x"] * x + c["c_last"] * last + c["c_0"] * m0 + c["c_1"] * m1 + c["c_2"] * m2
        x, m1, m2 = c["p_x"] * last + c["p_0"] * m0 + c["p_1"] * m1, m0, m1
    return x


def _instead(rule: Rule, past: Past, step: int) -> np.ndarray:
    """The newest velocity of the model; of SeaCache the line through the two newest."""
    newest = past.asked[-1]
    if not isinstance(rule, SeaCache) or len(past.asked) < 2:
        return past.velocities[newest]
    before = past.asked[-2]
    slope = (past.velocities[newest] - past.velocities[before]) / (past.sigmas[newest] - past.sigmas[before])
    return np.asarray(past.velocities[newest] + slope * (past.sigmas[step] - past.sigmas[newest]), np.float32)
