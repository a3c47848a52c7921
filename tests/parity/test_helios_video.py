"""Helios from a published layout to frames, against diffusers' HeliosPyramidPipeline: a distilled model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import HeliosPyramidPipeline

from helpers.artifacts import build_artifact, shared
from helpers.reference_models import relative_error
from wanbuild.toy.checkpoint import write_toy
from wanrun import load
from wanrun.artifact.manifest import read_manifest

LATENTS = 1e-5  # seen: 1.5e-6
FRAMES, STEPS, SEED, SIZE = 65, 2, 3, (128, 64)


def write_checkpoint(folder: Path) -> None:
    """A toy of another gamma than the published one, with which the reference fails on CPUs."""
    write_toy(folder, "helios-distilled-wan2.1")
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "gamma": 0.3}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(tmp_path_factory, "helios-distilled", write_checkpoint)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(
        tmp_path_factory,
        "helios-distilled-artifact",
        lambda folder: build_artifact(checkpoint, folder, SIZE, FRAMES),
    )


def expected(checkpoint: Path, output_type: str) -> Any:
    pipe = HeliosPyramidPipeline.from_pretrained(checkpoint)
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        prompt="a cat",
        height=SIZE[1],
        width=SIZE[0],
        num_frames=FRAMES,
        guidance_scale=1.0,
        pyramid_num_inference_steps_list=[STEPS] * 3,
        is_amplify_first_chunk=True,
        generator=torch.Generator().manual_seed(SEED),
        output_type=output_type,
    ).frames


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
def test_two_chunks_of_three_sizes(checkpoint: Path, artifact: Path) -> None:
    """The first one has twice the steps. Live it is the same video, with guidance too."""
    chunks = read_manifest(artifact).model.chunks
    assert chunks is not None and chunks.alone and chunks.pyramid is not None and chunks.pyramid.doubled
    told: list[tuple[int, int]] = []
    with load(artifact) as pipeline:
        options: dict[str, Any] = {"num_steps": STEPS, "seed": SEED, "guidance_scale": 1.0}
        made = pipeline.generate("a cat", on_step=lambda *done: told.append(done), **options)
        options |= {"guidance_scale": 2.0, "negative_prompt": "blurry"}
        whole = pipeline.generate("a cat", **options)
        live = list(pipeline.live("a cat", max_frames=FRAMES, **options))
    assert told == [(step, 18) for step in range(1, 19)]
    assert relative_error(made.latents, expected(checkpoint, "latent").numpy()) < LATENTS
    difference = np.abs(255 * expected(checkpoint, "np") - made.frames)
    assert made.frames.shape == difference.shape == (1, FRAMES, 64, 128, 3)
    assert (difference > 1).mean() < 1e-3 and made.frames.std() > 20
    assert [chunk.frames.shape[1] for chunk in live] == [33, 32]
    np.testing.assert_array_equal(np.concatenate([chunk.latents for chunk in live], 2), whole.latents)
    np.testing.assert_array_equal(np.concatenate([chunk.frames for chunk in live], 1), whole.frames)
