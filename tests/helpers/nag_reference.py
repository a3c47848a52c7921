"""diffusers' transformers with normalised attention guidance: its authors' formula in NumPy is the judge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

TEXT = 512
"""Text tokens; those of an image are in front of them."""


def formula(
    positive: np.ndarray, negative: np.ndarray, scale: float, tau: float, alpha: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the guided attention of tokens (B, S, D), and of which tokens the norm was limited."""
    away = positive * scale - negative * (scale - 1)
    ratio = np.abs(away).sum(-1, keepdims=True) / np.abs(positive).sum(-1, keepdims=True)
    limited = ratio > tau
    away = np.where(limited, away * (tau / ratio), away)
    return alpha * away + (1 - alpha) * positive, limited


class _Guided:
    """The processor of an attention to text; a pass of the negative prompt stays as it is."""

    def __init__(self, negative: torch.Tensor, settings: tuple[float, float, float]) -> None:
        self._negative, self._settings, self._own = negative, settings, WanAttnProcessor()
        self.limited = list[np.ndarray]()

    def __call__(self, attn: Any, hidden: torch.Tensor, text: torch.Tensor, *rest: Any) -> torch.Tensor:
        own, settings = text[:, -TEXT:], self._settings
        if torch.equal(own, self._negative.expand_as(own)):
            return self._own(attn, hidden, text, *rest)
        nothing, project = torch.nn.Identity(), attn.to_out
        with patch.dict(attn._modules, to_out=torch.nn.ModuleList([nothing, nothing])):
            whole = self._own(attn, hidden, text, *rest).double().numpy()
            with patch.dict(attn._modules, add_k_proj=None):
                negative = self._negative.expand_as(own)
                away, kept = (self._own(attn, hidden, one, *rest).double().numpy() for one in (negative, own))
        found, limited = formula(kept, away, *settings)
        self.limited.append(limited)
        return project[0](torch.from_numpy(found + whole - kept).to(hidden.dtype))  # with that of an image


@contextmanager
def avoiding(
    transformer: Any, negative: np.ndarray, settings: tuple[float, float, float]
) -> Iterator[list[np.ndarray]]:
    """Guides a transformer away from a negative prompt.

    Args:
        transformer: diffusers' model.
        negative: the embeddings (1, 512, text_dim).
        settings: scale, tau and alpha.

    Returns:
        Of each attention that was guided, the tokens whose norm was limited.
    """
    with torch.no_grad():
        judge = _Guided(transformer.condition_embedder.text_embedder(torch.from_numpy(negative)), settings)
    blocks = [*transformer.blocks, *getattr(transformer, "vace_blocks", ())]
    own = [block.attn2.processor for block in blocks]
    try:
        for block in blocks:
            block.attn2.processor = judge
        yield judge.limited
    finally:
        for block, processor in zip(blocks, own, strict=True):
            block.attn2.processor = processor
