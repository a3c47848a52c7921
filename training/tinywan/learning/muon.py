"""Muon in float32: momentum whose matrices are made nearly orthogonal, those of one shape together.

torch's own multiplies in bfloat16, for which a CPU without bfloat16 instructions needs ten times as long.
Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the factor of
the rate is that of Liu et al., "Muon is Scalable for LLM Training", 2025 (torch's ``match_rms_adamw``), so
that a step is as long as AdamW's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MOMENTUM = 0.9


class Muon(torch.optim.Optimizer):
    """Trains matrices.

    Args:
        matrices: (rows, columns) each.
        lr: the learning rate.
        weight_decay: by rate and step.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes a step with Nesterov's momentum."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    shapes.setdefault(matrix.shape, []).append(matrix)
            for shape, matrices in shapes.items():
                rate = group["lr"] * 0.2 * math.sqrt(max(shape))
                updates = orthogonal(torch.stack([self._momentum(matrix) for matrix in matrices]))
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)

    def _momentum(self, matrix: Tensor) -> Tensor:
        """Adds a matrix's gradient to its momentum, and returns what both say."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        return matrix.grad.lerp(state["momentum"].lerp_(matrix.grad, 1 - MOMENTUM), MOMENTUM)


def orthogonal(matrices: Tensor) -> Tensor:
    """Returns matrices (N, rows, columns) with singular values near 1: five steps of Newton and Schulz."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
