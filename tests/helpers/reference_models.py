"""Reference modules with random values for every parameter, and how errors are measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def randomise(module: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """Gives every parameter a random value that keeps activations near one; returns the state dict.

    Norm scales are near 1, biases and small tables near 0, matrices have 1/√fan_in. The published initial
    values (scales of one, biases of zero) would hide a swapped or missing parameter.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim == 1 or "table" in name or "attention_bias" in name:
                parameter.copy_(0.2 * noise)
            elif name == "shared.weight":
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / np.sqrt(parameter[0].numel()))
    return {name: value.numpy() for name, value in module.state_dict().items()}


def relative_error(value: Any, reference: Any) -> float:
    """‖value − reference‖ / ‖reference‖ in float64."""
    reference = np.asarray(reference, np.float64)
    return float(np.linalg.norm(np.asarray(value, np.float64) - reference) / np.linalg.norm(reference))
