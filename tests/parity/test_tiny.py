"""The tiny checkpoints, which have learned: whole generations against diffusers, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinywan.judge import judge
from tinywan.yardstick import first_frame

import wanrun
from helpers.artifacts import build_artifact, shared
from helpers.reference_models import relative_error
from helpers.torch_threads import one_thread
from helpers.whole_path import LATENTS
from wanbuild.check.reference_pipeline import Made, load_reference, run_reference
from wanbuild.variants.table import variants

TINY = Path(__file__).parents[2] / "artifacts" / "tiny"
CHECKPOINTS = sorted(folder.name for folder in TINY.glob("wan*"))
PROMPTS: Mapping[str, int] = {
    "a red star moves to the right on a speckled brown ground": 3,
    "a big yellow box moves up and a small blue triangle shrinks over grey ground": 4,
}
"""Captions of things that no training video showed, each with a seed."""

STEPS = 20

# diffusers hands arrays to NumPy in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


def media(prompt: str, variant: str) -> wanrun.Media | None:
    """What image to video is given."""
    if variants()[variant].reference_class == "WanPipeline":
        return None
    return wanrun.Media(image=first_frame(prompt))


@pytest.fixture(scope="module", params=CHECKPOINTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ours(variant: str, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, wanrun.Result]:
    folder = shared(
        tmp_path_factory,
        f"tiny-{variant}-float32",
        lambda target: build_artifact(TINY / variant, target, (96, 64), 17, loop="step"),
    )
    with wanrun.load(folder, embeddings="none") as pipeline:
        return {
            prompt: pipeline.generate(
                prompt,
                seed=seed,
                num_steps=STEPS,
                media=media(prompt, variant),
            )
            for prompt, seed in PROMPTS.items()
        }


@pytest.fixture(scope="module")
def theirs(variant: str) -> Mapping[str, Made]:
    known = variants()[variant]
    pipe = load_reference(TINY / variant, known.reference_class)
    made = {}
    for prompt, seed in PROMPTS.items():
        arguments: dict[str, Any] = {
            "prompt": prompt,
            "negative_prompt": "",
            "width": 96,
            "height": 64,
            "num_frames": 17,
            "num_inference_steps": STEPS,
            "guidance_scale": known.guidance_scale,
            "generator": torch.manual_seed(seed),
            **known.options,  # the second expert's guidance
        }
        if given := media(prompt, variant):
            arguments = known.reference_arguments(given, arguments)
        with one_thread():
            made[prompt] = run_reference(pipe, **arguments)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_whole_path(
    ours: Mapping[str, wanrun.Result],
    theirs: Mapping[str, Made],
    variant: str,
    prompt: str,
    record_property: Any,
) -> None:
    error = relative_error(ours[prompt].latents, theirs[prompt].latents)
    expected = np.round(theirs[prompt].frames[0] * 255).astype(int)
    levels = np.abs(ours[prompt].frames[0] - expected).max()
    record_property("latents_relative_error", error)
    scores = judge(ours[prompt].frames[0], prompt).score, judge(expected.astype(np.uint8), prompt).score
    print(f"{variant}: latents {error:.1e}, at most {levels} levels, scores {scores}", flush=True)
    assert error < LATENTS
    assert levels <= 1
    assert scores[0] == scores[1] >= 0.75


def test_every_checkpoint_is_here() -> None:
    assert CHECKPOINTS == ["wan2.1-t2v"]
