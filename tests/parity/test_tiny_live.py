"""The training of the causal tiny model: it learns what its sampler does, and its checkpoint says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from tinywan.checkpoint import FOLDER
from tinywan.endless import BLOCK, random_story
from tinywan.learning import causal, export, live, log, models
from tinywan.learning.course import Plan
from tinywan.learning.stories import CHANGES, Stories

SHAPE = (16, BLOCK, 4, 6)
"""Of a block."""


def test_the_pass_of_training_is_what_the_sampler_does() -> None:
    """Its blocks see one another through a cache, before the window is full and when it moves."""
    torch.manual_seed(2)
    blocks, sigma = causal.WINDOW + 2, 0.625
    model = models.transformer().eval()
    clean, noisy = torch.randn(2, 1, blocks, *SHAPE)
    texts = torch.randn(1, 2, 32, models.TEXT_WIDTH)
    turns = torch.tensor([[0, 0, 1, 1, 1, 0]])
    with torch.no_grad():
        forced = causal.Forced(model, blocks, *SHAPE[-2:])
        expected = forced(clean[:, :-1], noisy, torch.full((1, blocks), sigma), texts, turns)
    sampler = causal.Sampler(model, (1, *SHAPE), seed=0)
    for block, turn in enumerate(turns[0]):
        found = sampler.velocity(noisy[:, block], sigma, texts[:, turn])
        torch.testing.assert_close(found, expected[:, block], atol=1e-4, rtol=1e-4)
        sampler.remember(clean[:, block], texts[:, turn])


def test_a_block_sees_the_first_one_and_those_before_it() -> None:
    assert [causal.seen(block) for block in (0, 1, 3, 4, 9)] == [
        [],
        [0],
        [0, 1, 2],
        [0, 2, 3],
        [0, 7, 8],
    ]


def test_a_causal_model_learns_and_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "EVERY", 4)
    monkeypatch.setattr(live, "BATCH", 1)
    rng = np.random.default_rng(4)
    scenes, turns = zip(*(random_story(rng, 3, CHANGES) for _ in range(2)), strict=True)
    bank = Stories(list(scenes), np.array(turns), 0.1 * torch.randn(2, 16, 3 * BLOCK, 4, 6).half())
    live.learn(bank, tmp_path, 5, Plan("live", steps=12, rate=3e-3), compiled=False)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(losses) == 3  # of the last ones it sees what it made itself
    assert losses[1] < 0.8 * losses[0]
    (tmp_path / export.SHARED).symlink_to(FOLDER / export.SHARED, target_is_directory=True)
    export.write_live(tmp_path, tmp_path / "written")
    written = WanTransformer3DModel.from_pretrained(tmp_path / "written" / "transformer")
    learned = WanTransformer3DModel.from_pretrained(tmp_path / "live")
    assert torch.equal(written.proj_out.weight, learned.proj_out.weight.half())
    config = json.loads((tmp_path / "written" / "transformer" / "config.json").read_text())
    assert (config["local_attn_size"], config["sink_size"], config["num_frames_per_block"]) == (12, 3, 3)
    assert (tmp_path / "written" / "vae" / "config.json").exists()
