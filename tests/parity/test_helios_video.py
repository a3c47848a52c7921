"""Helios from a published layout to frames, against diffusers' HeliosPyramidPipeline: a distilled model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import HeliosPyramidPipeline

from helpers.artifacts import build_artifact, shared
from helpers.reference_models import relative_error
from wanbuild.toy.toy_checkpoint import write_toy
from wanrun import load
from wanrun.artifact.manifest import read_manifest
from wanrun.generation.pipeline import Pipeline
from wanrun.media.inputs import Media
from wanrun.replay.samples import sample_image, sample_video

pytestmark = pytest.mark.thorough

LATENTS = 1e-5  # seen: 1.5e-6
FRAMES, STEPS, SEED, SIZE = 65, 2, 3, (128, 64)
OPTIONS: dict[str, Any] = {"num_steps": STEPS, "seed": SEED}
KINDS = ("mean", "std")


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
        lambda folder: build_artifact(checkpoint, folder, SIZE, FRAMES, guidance=(False,)),
    )


@pytest.fixture(scope="module")
def pipeline(artifact: Path) -> Iterator[Pipeline]:
    with load(artifact) as loaded:
        yield loaded


def expected(checkpoint: Path, frames: int = FRAMES, **media: Any) -> tuple[np.ndarray, np.ndarray]:
    """The reference's latents and frames."""
    pipe = HeliosPyramidPipeline.from_pretrained(checkpoint)
    pipe.set_progress_bar_config(disable=True)
    decode, latents = pipe.vae.decode, list[np.ndarray]()
    mean, std = (np.reshape(getattr(pipe.vae.config, f"latents_{name}"), (1, -1, 1, 1, 1)) for name in KINDS)

    def kept(given: torch.Tensor, **how: Any) -> Any:
        latents.append((given.numpy() - mean) / std)
        return decode(given, **how)

    pipe.vae.decode = kept
    made = pipe(
        prompt="a cat",
        height=SIZE[1],
        width=SIZE[0],
        num_frames=frames,
        guidance_scale=1.0,
        pyramid_num_inference_steps_list=[STEPS] * 3,
        is_amplify_first_chunk=True,
        generator=torch.Generator().manual_seed(SEED),
        output_type="np",
        **media,
    ).frames
    return np.concatenate(latents, axis=2), made


def check(latents: np.ndarray, frames: np.ndarray, reference: tuple[np.ndarray, np.ndarray]) -> None:
    assert relative_error(latents, reference[0]) < LATENTS
    difference = np.abs(255 * reference[1] - frames)
    assert frames.shape == difference.shape and (difference > 1).mean() < 1e-3 and frames.std() > 20


def test_two_chunks_of_three_sizes(checkpoint: Path, artifact: Path, pipeline: Pipeline) -> None:
    """The first one has twice the steps. Live it is the same video."""
    chunks = read_manifest(artifact).model.chunks
    assert chunks is not None and chunks.alone and chunks.pyramid is not None and chunks.pyramid.doubled
    told: list[tuple[int, int]] = []
    made = pipeline.generate("a cat", on_step=lambda *done: told.append(done), **OPTIONS)
    live = list(pipeline.live("a cat", max_frames=FRAMES, **OPTIONS))
    assert told == [(step, 18) for step in range(1, 19)]
    assert made.frames.shape == (1, FRAMES, 64, 128, 3)
    check(made.latents, made.frames, expected(checkpoint))
    assert [chunk.frames.shape[1] for chunk in live] == [33, 32]
    np.testing.assert_array_equal(np.concatenate([chunk.latents for chunk in live], 2), made.latents)
    np.testing.assert_array_equal(np.concatenate([chunk.frames for chunk in live], 1), made.frames)


@pytest.mark.parametrize(
    ("frames", "media"),
    [(33, {"image": sample_image(150, 70, 5)}), (65, {"video": sample_video(*SIZE, 40, 6)})],
)
def test_after_an_image_or_a_video(
    checkpoint: Path, pipeline: Pipeline, frames: int, media: dict[str, Any]
) -> None:
    """The image is of another size; the video has more than a chunk, whose first frame is not a chunk's."""
    live = list(pipeline.live("a cat", max_frames=frames, media=Media(**media), **OPTIONS))
    latents, made = (
        np.concatenate(parts, axis)
        for parts, axis in (([chunk.latents for chunk in live], 2), ([chunk.frames for chunk in live], 1))
    )
    check(latents, made, expected(checkpoint, frames, **media))
