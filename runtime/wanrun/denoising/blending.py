"""Overlapping windows over the latents of a long video, in each of which every step runs, and their blending.

Every step is linear in its latents, its history and the model's prediction (``wanrun.denoising.solvers``).
So a blend of the windows' results, latents and history, is the step with the blended predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from wanrun.denoising.state import State


@dataclass(frozen=True)
class Blending:
    """Windows of ``length`` latent frames, each ``length - overlap`` frames after the one before.

    Together they cover ``total`` latent frames, at least ``length``. Neighbours share ``overlap`` frames, at
    least 1 and less than ``length``; the last window may share more.
    """

    total: int
    length: int
    overlap: int

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first latent frame of each window."""
        last = self.total - self.length
        return (*range(0, last, self.length - self.overlap), last)

    @cached_property
    def weights(self) -> np.ndarray:
        """The weight of each window in each of its latent frames, float32 (windows, length).

        They rise by one from both ends of a window up to its middle, as far as the overlap, and those of a
        latent frame of the video are divided by their sum: where one window is alone it counts 1, and over
        two it changes evenly from the earlier to the later one.
        """
        ends = np.minimum(np.arange(1, self.length + 1), np.arange(self.length, 0, -1))
        rising = np.minimum(ends, self.overlap + 1).astype(np.float64)
        sums = np.zeros(self.total)
        for start in self.starts:
            sums[start : start + self.length] += rising
        return np.stack([rising / sums[self.of(start)] for start in self.starts]).astype(np.float32)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first latent frame of each window that no window before it has, counted in the window."""
        later = zip(self.starts, self.starts[1:], strict=False)
        return (0, *(self.length - (start - before) for before, start in later))

    def of(self, start: int) -> slice:
        """Returns the latent frames of the window that begins with one."""
        return slice(start, start + self.length)

    def decoded(self, temporal: int) -> list[tuple[slice, int]]:
        """Returns the latent frames of each window, and how many of its frames the window before it has.

        ``temporal`` are the frames of a latent frame.
        """
        firsts = zip(self.starts, self.firsts, strict=True)
        return [(self.of(start), 1 + (first - 1) * temporal if first else 0) for start, first in firsts]

    def blended(self, maker: Callable[..., State], carried: Collection[str]) -> Callable[..., State]:
        """Returns a function that steps a whole video's state with a program that steps a window's.

        ``maker`` takes and returns a window's state, and takes what all windows share. ``carried`` names the
        state's entries, arrays (B, C, T, h, w) or nested dicts of them; the whole video's are on the host.
        """

        def make(**given: Any) -> State:
            state = {name: given.pop(name) for name in carried}
            sums = _each(lambda array: np.zeros(array.shape, np.float32), state)
            for start, weights in zip(self.starts, self.weights, strict=True):
                frames = (slice(None), slice(None), self.of(start))
                made = maker(**given, **_each(partial(_part, frames), state))
                _each(partial(_add, frames, weights[:, None, None]), sums, made)
            return _each(lambda array, old: array.astype(old.dtype, copy=False), sums, state)

        return make


def _each(change: Callable[..., np.ndarray], arrays: Any, *others: Any) -> Any:
    """Returns nested dicts with each array changed; it gets the arrays of others in its place, too."""
    if isinstance(arrays, Mapping):
        return {name: _each(change, one, *(other[name] for other in others)) for name, one in arrays.items()}
    return change(*map(np.asarray, (arrays, *others)))


def _part(frames: tuple[slice, ...], array: np.ndarray) -> np.ndarray:
    """Returns a window of a whole video's array."""
    return np.ascontiguousarray(array[frames])


def _add(frames: tuple[slice, ...], weights: np.ndarray, sums: np.ndarray, made: np.ndarray) -> np.ndarray:
    """Adds a window's array with weights to that of a whole video, at its frames."""
    sums[frames] += made.astype(np.float32, copy=False) * weights
    return sums
