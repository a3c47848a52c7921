"""Prompt embeddings of random numbers."""

from __future__ import annotations

import numpy as np

from wanrun.weights.buffers import DTYPES

PROMPT = "a fox — “quoted” 猫 \U0001f98a"


def random_rows(length: int, width: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((length, width)).astype(DTYPES[dtype])


def same(first: np.ndarray | None, second: np.ndarray) -> bool:
    """Equal in dtype, shape and every bit."""
    return (
        first is not None
        and first.dtype == second.dtype
        and first.shape == second.shape
        and first.tobytes() == second.tobytes()
    )
