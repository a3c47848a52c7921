"""The vocabulary of mapping tables: rules and named transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

Transform = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Rule:
    """Maps the source keys that fully match a pattern to a parameter path.

    A group named ``layer`` in the regular expression ``pattern`` selects the row of a stacked parameter;
    other named groups are substituted into ``target``, e.g. ``blocks/attn1/to_q/weight`` or
    ``decoder/up_blocks/{i}/...``. A target of None is for keys that the model does not use, which are
    accepted and not read. ``transform`` is a name in ``TRANSFORMS``.
    """

    pattern: str
    target: str | None
    transform: str = "copy"


TRANSFORMS: Mapping[str, Transform] = MappingProxyType(
    {
        # Every transform returns a view, so that one assignment copies, reorders and casts.
        "copy": lambda x: x,
        "conv2d": lambda x: x.transpose(2, 3, 1, 0),  # (O, I, H, W) -> (H, W, I, O)
        "conv3d": lambda x: x.transpose(2, 3, 4, 1, 0),  # (O, I, T, H, W) -> (T, H, W, I, O)
        "vector": lambda x: x.reshape(max(x.shape)),  # (C, 1, 1, 1) -> (C,), also for C = 1
        "squeeze": lambda x: x.reshape([n for n in x.shape if n != 1]),
        "flatten_in": lambda x: x.reshape(x.shape[0], -1),  # (O, I, ...) -> (O, I·...), e.g. a patch conv
    }
)

PERMUTING = frozenset({"conv2d", "conv3d"})
"""The transforms that reorder values in memory; the others only change the shape."""


def halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Returns the rows of whole heads, (heads x head_dim, ...), with the even ones of each head first."""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.swapaxes(heads, 1, 2).reshape(rows.shape)
