"""The tiny checkpoints, which have learned: whole generations against diffusers, in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler
from tinywan import checkpoint
from tinywan.drawing import FRAMES, HEIGHT, WIDTH
from tinywan.judge import judge

import wanrun
from helpers.artifacts import LONG_TEXTS, compile_fast, shared
from helpers.reference_models import relative_error
from helpers.whole_path import LATENTS
from wanbuild.build import convert
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.check.reference_pipeline import Made
from wanbuild.conversion.convert_request import ConvertRequest
from wanrun.denoising.noise import initial_noise

PROMPT, SEED = "a red star moves to the right on a speckled brown ground", 3
"""A caption of things that no training video showed."""

STEPS = 20


@pytest.fixture(scope="module", params=checkpoint.names())
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ours(variant: str, tmp_path_factory: pytest.TempPathFactory) -> wanrun.Result:
    def build(target: Path) -> None:
        stored = dict.fromkeys(("transformer", "text_encoder", "image_encoder"), "float32")
        convert(ConvertRequest(checkpoint.FOLDER / variant, target, stored))
        options = BuildOptions(dtype="float32", loop="step")
        request = CompileRequest(target, ["cpu"], [(WIDTH, HEIGHT)], [FRAMES], [True], options=options)
        compile_fast(request, LONG_TEXTS)

    folder = shared(tmp_path_factory, f"tiny-{variant}-float32", build)
    with wanrun.load(folder, embeddings="none") as pipeline:
        media = checkpoint.media(variant, PROMPT)
        return pipeline.generate(PROMPT, seed=SEED, num_steps=STEPS, media=media)


@pytest.fixture(scope="module")
def theirs(variant: str) -> Made:
    return checkpoint.Reference(variant).generate(PROMPT, STEPS, seed=SEED)


@pytest.mark.thorough
def test_whole_path(ours: wanrun.Result, theirs: Made, variant: str, record_property: Any) -> None:
    error = relative_error(ours.latents, theirs.latents)
    made, expected = ours.frames[0], theirs.levels[0]
    levels = np.abs(made.astype(int) - expected).max()
    record_property("latents_relative_error", error)
    scores = judge(made, PROMPT).score, judge(expected, PROMPT).score
    print(f"{variant}: latents {error:.1e}, at most {levels} levels, scores {scores}", flush=True)
    assert error < LATENTS
    assert levels <= 1
    assert scores[0] == scores[1] >= 0.75


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """diffusers computes in float64 where its code says float32: sinusoids, norms, sigmas."""
    own = UniPCMultistepScheduler.set_timesteps

    def set_timesteps(self: Any, *arguments: Any, **options: Any) -> None:
        own(self, *arguments, **options)
        self.sigmas = self.sigmas.to(torch.float64)

    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(UniPCMultistepScheduler, "set_timesteps", set_timesteps),
    ):
        yield


@pytest.mark.thorough
def test_as_near_to_float64_as_the_reference_is(ours: wanrun.Result, theirs: Made, variant: str) -> None:
    """Seen 0.4 to 0.7. With values as they are, 512 of which are mostly alike, the sums gave 2.0 to 2.3."""
    with in_float64():
        noise = torch.from_numpy(initial_noise(SEED, ours.latents.shape))
        truth = checkpoint.Reference(variant, "float64").generate(PROMPT, STEPS, latents=noise).latents
    assert truth.dtype == np.float64
    distances = [relative_error(made.latents, truth) for made in (ours, theirs)]
    print(f"{variant}: {distances[0]:.1e} from float64, the reference {distances[1]:.1e}", flush=True)
    assert distances[0] < 1.2 * distances[1]


def test_every_checkpoint_is_here() -> None:
    assert checkpoint.names() == ["wan2.1-i2v", "wan2.1-t2v", "wan2.2-t2v"]
