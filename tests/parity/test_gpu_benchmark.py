"""The operations that benchmarks/gpu.py counts are those that torch counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from wanbuild.config import parse_config
from wanbuild.models.transformer_config import TransformerConfig
from wanbuild.published.base_configs import PUBLISHED_TRANSFORMERS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_operations_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_device import step_flops
    from gpu_torch import TEXT_TOKENS, Block, block_flops

    data = {**PUBLISHED_TRANSFORMERS["wan2.1-t2v-1.3b"], "num_attention_heads": 2, "ffn_dim": 320}
    config = parse_config(TransformerConfig, data, "transformer")
    tokens, width = 24, config.dim
    with FlopCounterMode(display=False) as counted, torch.device("meta"):
        x, kv = torch.zeros(2, tokens, width), torch.zeros(2, 2, TEXT_TOKENS, 128)
        angles = torch.zeros(tokens, 64)
        Block(width, 2, config.ffn_dim)(x, kv, kv, angles, angles)
    assert counted.get_total_flops() == 2 * block_flops(tokens, TEXT_TOKENS, width, config.ffn_dim)
    ends = 2 * 2 * tokens * width * (64 + 64)  # patches of 1 x 2 x 2 values of 16 channels, in and out
    of_blocks = config.num_layers * counted.get_total_flops()
    assert step_flops(config, tokens, TEXT_TOKENS, 2) == of_blocks + ends
