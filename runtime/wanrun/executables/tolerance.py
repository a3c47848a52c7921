"""How far two results of one computation may lie apart."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

TOLERANCES: Mapping[str, float] = MappingProxyType({"float32": 1e-4, "bfloat16": 5e-2})
"""Relative error allowed between kinds of machine and between compilers, by compute dtype.

Sums in another order change float32 latents by 1e-6 to 1e-5, and bfloat16 latents of four steps by 1e-2 to
5e-2. A wrong weight or program changes the latents by more than 1e-1.
"""

VELOCITY_TOLERANCES: Mapping[str, float] = MappingProxyType({"float32": 1e-4, "bfloat16": 2.5e-2})
"""The same of the transformer's own output: see ``wanrun.replay.velocity``. In bfloat16 right forms are
4e-3 to 1.2e-2 apart, the most with sharp attention and 40 layers (docs/notes/chips.md, "Trust")."""

W8A8_FACTOR = 4.0
"""What all of these are multiplied by where activations are rounded to 8 bits: float8 velocities are 2.3e-2
from the other form's, and the latents 1.3e-1."""

ALIKE = 1e-2
"""The same of one StableHLO compiled twice with the same options: a compiler may choose other kernels,
and TF32 rounds at 1e-3."""

LEVELS = 255
"""Of a frame's values, which are rounded: where latents agree exactly, they may differ by one."""


def relative_error(values: np.ndarray, reference: np.ndarray) -> float:
    """Returns ‖values − reference‖ / ‖reference‖, computed in float64; NaN for a reference of zeros.

    Args:
        values: what is judged. It comes first, as in NumPy's own comparisons.
        reference: what it should be, of the same shape.
    """
    if not np.any(reference):
        return float("nan")
    reference = np.asarray(reference, np.float64)
    return float(np.linalg.norm(np.asarray(values, np.float64) - reference) / np.linalg.norm(reference))


def levels_apart(reference: np.ndarray, values: np.ndarray) -> float:
    """Returns the root mean square of the difference of two frames' values; infinite for other shapes."""
    if values.shape != reference.shape:
        return float("inf")
    pairs = zip(values, reference, strict=True)  # frame by frame: a video is gigabytes in float64
    return float(np.sqrt(np.mean([np.mean((np.float64(one) - other) ** 2) for one, other in pairs])))


def most_levels(tolerance: float) -> float:
    """Returns the levels that frames may be apart, where a relative error of latents is allowed."""
    return 1 + LEVELS * tolerance


def first_difference(built: Any, here: Any, tolerance: float) -> str:
    """Says by how much the first outputs differ that do not agree, of two trees; empty where all do."""
    import jax

    said = jax.tree.map(lambda one, other: difference(one, other, tolerance), built, here)
    return next(filter(None, jax.tree.leaves(said)), "")


def difference(built: np.ndarray, here: np.ndarray, tolerance: float) -> str:
    """Says by how much two results of one program differ; empty where they agree."""
    if built.dtype == np.uint8:
        apart, most = levels_apart(built, here), most_levels(tolerance)
        return "" if apart <= most else f"by {apart:.3g} levels, at most {most:.3g}"
    first, second = built.astype(np.float64), here.astype(np.float64)
    if np.array_equal(first, second, equal_nan=True):
        return ""
    error = relative_error(second, first)
    return "" if error <= tolerance else f"by {error:.1e} relative, at most {tolerance:g}"
