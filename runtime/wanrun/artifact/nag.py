"""Normalised attention guidance (NAG): a negative prompt for steps of one pass, of models without guidance.

In every attention to text, the result for the prompt is moved away from that for the negative prompt
(arXiv:2505.21179; ``wanbuild.models.nag`` has the formula). A profile is built for it, or not.
"""

from __future__ import annotations

__all__ = ["NAG", "NAG_DEFAULTS", "nag_settings"]

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

NAG = "nag"
"""The input of steps that can, float32 (3,): the values of ``NAG_DEFAULTS``' options."""

NAG_DEFAULTS: Mapping[str, float] = MappingProxyType({"nag_scale": 1.0, "nag_tau": 2.5, "nag_alpha": 0.25})
"""The options of a generation. At a scale of 1 steps are as without NAG, and as fast. The others are the
defaults of its authors, who use a scale of 11 with Wan."""


def nag_settings(options: Mapping[str, Any]) -> np.ndarray:
    """Returns the input of steps for the options of a generation, which has none of them where NAG is off."""
    return np.array([options.get(name, default) for name, default in NAG_DEFAULTS.items()], np.float32)
