"""How far two results of one computation may lie apart."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

TOLERANCES: Mapping[str, float] = MappingProxyType({"float32": 1e-4, "bfloat16": 5e-2})
"""Relative error allowed between kinds of machine and between compilers, by compute dtype.

Sums in another order change float32 latents by 1e-6 to 1e-5, and bfloat16 latents by about 1e-2. Both bounds
leave a factor of five to ten. A wrong weight or program changes the latents by more than 1e-1.
"""

LEVELS = 255
"""Of a frame's values, which are rounded: where latents agree exactly, they may differ by one."""


def relative_error(reference: np.ndarray, values: np.ndarray) -> float:
    """Returns the norm of the difference, relative to the reference's; NaN where that is zero."""
    if not np.any(reference):
        return float("nan")
    return float(np.linalg.norm(values - reference) / np.linalg.norm(reference))


def levels_apart(reference: np.ndarray, values: np.ndarray) -> float:
    """Returns the root mean square of the difference of two frames' values; infinite for other shapes."""
    if values.shape != reference.shape:
        return float("inf")
    return float(np.sqrt(np.mean((values.astype(np.float64) - reference.astype(np.float64)) ** 2)))


def most_levels(tolerance: float) -> float:
    """Returns the levels that frames may be apart, where a relative error of latents is allowed."""
    return 1 + LEVELS * tolerance
