"""Video to video against diffusers' WanVideoToVideoPipeline, and with two experts, by its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import wanrun
from helpers.reference_models import relative_error
from helpers.whole_path import LATENTS, NEGATIVE, PROMPT
from wanbuild.check.reference_pipeline import Reference, schedulers
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.replay.samples import sample_video

STEPS, SEED, SCALE, SHIFT = 5, 7, 3.0, 3.0


class Judge:
    """diffusers' pipeline with one transformer, in whose place another one is below the boundary.

    Args:
        checkpoint: the checkpoint's folder.
        variant: its variant.
        size: width and height of the video that is made.
    """

    def __init__(self, checkpoint: Path, variant: str, size: tuple[int, int]) -> None:
        self._parts, self._size = Reference(checkpoint, variant).pipe, size

    def __call__(self, video: Any, solver: str, strength: float, boundary: float = 0.0) -> np.ndarray:
        """The final latents."""
        from diffusers import WanVideoToVideoPipeline

        parts = self._parts
        names = ("tokenizer", "text_encoder", "vae", "transformer")
        pipe = WanVideoToVideoPipeline(
            **{name: getattr(parts, name) for name in names},
            scheduler=schedulers()[solver](parts.scheduler.config, SHIFT),
        )
        pipe.set_progress_bar_config(disable=True)
        pipe.vae_scale_factor_spatial = parts.vae_scale_factor_spatial  # its own is of Wan 2.1's VAE alone
        high, low = (getattr(parts, name, None) for name in TRANSFORMERS)
        own = high.forward

        def forward(**given: Any) -> Any:
            return (low if given["timestep"][0] < boundary * 1000 else own)(**given)

        width, height = self._size
        with patch.object(high, "forward", forward):
            made = pipe(
                video=video,
                prompt=PROMPT,
                negative_prompt=NEGATIVE,
                width=width,
                height=height,
                num_inference_steps=STEPS,
                guidance_scale=SCALE,
                strength=strength,
                generator=torch.manual_seed(SEED),
                output_type="latent",
            )
        latents: np.ndarray = made.frames.numpy()
        return latents


def ours(pipeline: wanrun.Pipeline, video: Any, **options: Any) -> wanrun.Result:
    given: Mapping[str, Any] = {
        "num_steps": STEPS,
        "seed": SEED,
        "guidance_scale": SCALE,
        "flow_shift": SHIFT,
    }
    return pipeline.generate(PROMPT, NEGATIVE, media=wanrun.Media(video=video), **given, **options)


@pytest.fixture(scope="module")
def experts(two_experts_artifact: Path) -> Iterator[wanrun.Pipeline]:
    with wanrun.load(two_experts_artifact, embeddings="none") as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def judge(two_experts_checkpoint: Path) -> Judge:
    return Judge(two_experts_checkpoint, "wan2.2-t2v", (96, 64))


@pytest.mark.thorough
@pytest.mark.parametrize("solver", ["unipc", "dpm++", "euler"])
def test_strengths(experts: wanrun.Pipeline, judge: Judge, solver: str) -> None:
    """Of one transformer: one step, three, and all. Frames of another size are brought to the video's."""
    video = sample_video(120, 70, 9, 3)
    for strength in (0.3, 0.7, 1.0):
        expected = judge(video, solver, strength)
        options = {"strength": strength, "solver": solver, "boundary": 0.0}
        found = ours(experts, video, **options, loop="step")
        assert relative_error(found.latents, expected) < LATENTS
        assert found.options["strength"] == strength and found.options["num_steps"] == STEPS
        scanned = ours(experts, video, **options, loop="scan")
        assert np.array_equal(scanned.latents, found.latents)


def test_two_experts(experts: wanrun.Pipeline, judge: Judge) -> None:
    """The boundary stays where it is: of strength 0.8 both experts have steps, of 0.5 the low-noise one."""
    video = sample_video(96, 64, 9, 4)
    for strength in (0.8, 0.5):
        found = ours(experts, video, strength=strength, solver="unipc", boundary=0.8)
        assert relative_error(found.latents, judge(video, "unipc", strength, 0.8)) < LATENTS
    assert relative_error(found.latents, judge(video, "unipc", strength)) > 100 * LATENTS


@pytest.mark.thorough
def test_a_timestep_per_token(ti2v_checkpoint: Path, ti2v_artifact: Path) -> None:
    video = sample_video(160, 96, 13, 5)
    expected = Judge(ti2v_checkpoint, "wan2.2-ti2v", (160, 96))(video, "unipc", 0.7)
    with wanrun.load(ti2v_artifact, embeddings="none") as pipeline:
        assert relative_error(ours(pipeline, video, strength=0.7).latents, expected) < LATENTS
