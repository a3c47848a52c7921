"""What whole generations are compared with, and how."""

from __future__ import annotations

from typing import Any

import numpy as np

from wanbuild.check.reference_pipeline import Made, Reference

LATENTS = 1e-5  # the aim; seen: 1-3e-6, and the reference's own float32 noise against float64 is 1-2e-6
PROMPT = "a cat &amp; a dog,   in the  snow"
NEGATIVE = "ugly, blurry"


def generate(reference: Reference, **options: Any) -> Made:
    """One generation of the reference from ``PROMPT`` and ``NEGATIVE``; options are those of its ``run``."""
    return reference.run(prompt=PROMPT, negative_prompt=NEGATIVE, **options)


def within_one_level(frames: np.ndarray, expected: np.ndarray) -> float:
    """Share of the uint8 values that differ by at most one."""
    assert frames.shape == expected.shape
    return float(np.mean(np.abs(frames.astype(int) - expected.astype(int)) <= 1))
