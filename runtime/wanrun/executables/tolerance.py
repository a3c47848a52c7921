"""The tolerances between two results of one computation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

TOLERANCES: Mapping[str, float] = MappingProxyType({"float32": 1e-4, "bfloat16": 5e-2})
"""Relative error allowed between kinds of machine and between compilers, by compute dtype.

Sums in another order change float32 latents by 1e-6 to 1e-5, and bfloat16 latents of four steps by 1e-2 to
5e-2. A wrong weight or program changes the latents by more than 1e-1.
"""

CALL_TOLERANCES: Mapping[str, float] = MappingProxyType({"float32": 1e-4, "bfloat16": 2.5e-2})
"""The same of one call, by a program's compute dtype. Velocities of right forms in bfloat16 are 4e-3 to
1.2e-2 apart, the most with sharp attention and 40 layers (docs/notes/chips.md, "Trust")."""

W8A8_FACTOR = 4.0
"""The factor of all of these where activations are rounded to 8 bits: float8 velocities are 2.3e-2
from the other form's, and the latents 1.3e-1."""

ALIKE = 1e-2
"""The same of one StableHLO compiled twice with the same options: a compiler may choose other kernels,
and TF32 rounds at 1e-3."""

RUN = 256
"""Consecutive values of a program's results whose differences are added too, where rounding cancels and a
fault that shifts a channel does not: docs/notes/chips.md, "Trust"."""

PIECE = 2**22
"""Values that are compared at a time, a multiple of ``RUN``."""

LEVELS = 255
"""Of a frame's values, which are rounded: where latents agree exactly, they may differ by one."""


def relative_error(values: np.ndarray, reference: np.ndarray, run: int = 1) -> float:
    """Returns ‖values − reference‖ / ‖reference‖, computed in float64; NaN for a reference of zeros.

    Args:
        values: what is judged. It comes first, as in NumPy's own comparisons.
        reference: what it should be, of the same shape.
        run: how many consecutive differences are added before their norm is taken. That leaves independent
            differences as large as they are, and makes those that are alike √run times as large.
    """
    flat, other, apart, whole = np.ravel(values), np.ravel(reference), 0.0, 0.0
    for first in range(0, other.size, PIECE):  # activations of a long video are gigabytes in float64
        one, two = (np.asarray(array[first : first + PIECE], np.float64) for array in (flat, other))
        difference = one - two
        if run > 1:
            difference = np.add.reduceat(difference, np.arange(0, two.size, run))
        apart, whole = apart + float(np.sum(difference**2)), whole + float(np.sum(two**2))
    return math.sqrt(apart / whole) if whole else math.nan


def levels_apart(reference: np.ndarray, values: np.ndarray) -> float:
    """Returns the root mean square of the difference of two frames' values; infinite for other shapes."""
    if values.shape != reference.shape:
        return float("inf")
    pairs = zip(values, reference, strict=True)  # frame by frame: a video is gigabytes in float64
    return float(np.sqrt(np.mean([np.mean((np.float64(one) - other) ** 2) for one, other in pairs])))


def most_levels(tolerance: float) -> float:
    """Returns the levels that frames may be apart, where a relative error of latents is allowed."""
    return 1 + LEVELS * tolerance


class Apart(NamedTuple):
    """The difference of two results of one program, and its limit, in the same unit.

    ``error`` is the relative error, of all values or of sums over runs of them, whichever is larger; of
    frames the root mean square of the difference, in levels.
    """

    error: float
    most: float
    unit: str = "relative"

    @property
    def share(self) -> float:
        """The error as a part of the largest; infinite for values that cannot be compared."""
        return math.inf if math.isnan(self.error) else self.error / self.most

    @property
    def agrees(self) -> bool:
        """Whether the results are near enough."""
        return self.share <= 1

    def __str__(self) -> str:
        return f"by {self.error:.1e} {self.unit}, at most {self.most:.2g}"


def most_apart(built: Any, here: Any, tolerance: float, run: int = 1) -> Apart:
    """Returns the largest difference among the outputs of one program.

    ``built`` and ``here``, what the outputs should be, are nested dicts of arrays; ``tolerance`` is the
    relative error that is allowed. Sums over ``run`` differences are compared too: see ``relative_error``.
    """
    import jax

    pairs = zip(jax.tree.leaves(built), jax.tree.leaves(here), strict=True)
    found = (_apart(_values(one), _values(other), tolerance, run) for one, other in pairs)
    return max(found, key=lambda one: one.share, default=Apart(0.0, tolerance))


def _values(array: Any) -> np.ndarray:
    """Returns an array on the host, bits of bfloat16 as what they are."""
    values = np.asarray(array)
    return values.view(ml_dtypes.bfloat16) if values.dtype == np.uint16 else values


def _apart(built: np.ndarray, here: np.ndarray, tolerance: float, run: int) -> Apart:
    if built.dtype == np.uint8:
        return Apart(levels_apart(built, here), most_levels(tolerance), "levels")
    if built.shape != here.shape:
        return Apart(math.inf, tolerance)
    if np.array_equal(built, here):
        return Apart(0.0, tolerance)
    return Apart(max(relative_error(built, here, each) for each in (1, run)), tolerance)
