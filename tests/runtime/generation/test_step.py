"""What a function given as on_step sees of a step: its latents, and a preview."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

import wanrun
from helpers.manifests import plain_manifest, with_model
from helpers.options import PROFILE
from helpers.refusals import refuses
from wanrun.artifact.manifest import Recorded, read_manifest

PROMPT = "a fox"


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["step", "scan"])
def test_latents_and_preview(toy_artifact: Path, loop: str) -> None:
    seen: list[wanrun.Step] = []
    shown: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def without(done: int, total: int, step: wanrun.Step) -> None:
        replace(step, manifest=step.manifest.changed(preview=())).preview()

    def on_step(done: int, total: int, step: wanrun.Step) -> None:
        seen.append(step)
        shown.append((step.latents, step.clean, step.preview()))

    with wanrun.load(toy_artifact, embeddings="none", loop=loop) as pipeline:
        map_ = np.array(pipeline.manifest.preview)
        assert map_.shape == (17, 3)
        with refuses("unsupported", remedy="wanbuild compile"):
            pipeline.generate(PROMPT, num_steps=2, on_step=without)
        result = pipeline.generate(PROMPT, num_steps=3, on_step=on_step)
    latents, clean, preview = shown[-1]
    assert len(shown) == (3 if loop == "step" else 1)
    assert np.array_equal(latents, result.latents)
    np.testing.assert_allclose(clean, latents, rtol=0, atol=1e-5)  # the last step ends at sigma 0
    assert loop == "scan" or np.abs(shown[0][0] - shown[0][1]).max() > 0.1
    expected = np.moveaxis(clean[0].astype(np.float64), 0, -1) @ map_[:-1] + map_[-1]
    assert preview.dtype == np.uint8 and preview.shape == (*latents.shape[2:], 3)
    assert np.abs(preview - expected.clip(0, 255)).max() <= 0.51
    if loop == "step":
        with refuses("closed", what="latents", remedy="on_step"):
            _ = seen[0].latents


def test_frames_of_reference_images_are_no_part_of_the_video() -> None:
    manifest = with_model(plain_manifest(), leading_latents=2)
    made = np.arange(1 * 2 * 5 * 2 * 2, dtype=np.float32).reshape(1, 2, 5, 2, 2)
    step = wanrun.Step({"latents": made, "history": {"m1": -made}}, manifest, PROFILE)
    assert np.array_equal(step.latents, made[:, :, 2:]) and np.array_equal(step.all_latents, made)
    assert np.array_equal(step.clean, -made[:, :, 2:]) and np.array_equal(step.all_clean, -made)


@pytest.mark.slow
def test_the_number_of_parameters_decides(toy_artifact: Path) -> None:
    """A third one with a default is the function's own, as in a loop's lambda."""
    counts: list[tuple[int, int, int]] = []

    def two(done: int, total: int, own: int = 7) -> None:
        counts.append((done, total, own))

    with wanrun.load(toy_artifact, embeddings="none") as pipeline:
        pipeline.generate(PROMPT, num_steps=1, on_step=two)
        for wrong in (lambda done: None, lambda a, b, c, d: None):
            with refuses("wrong_type", what="on_step", expected="(done, total)"):
                pipeline.generate(PROMPT, num_steps=1, on_step=wrong)  # type: ignore[arg-type]
    assert counts == [(1, 1, 7)]


def test_a_preview_of_another_model_is_refused(toy_artifact: Path) -> None:
    manifest = read_manifest(toy_artifact)
    with pytest.raises(ValueError, match=r"previews .*\b1 rows"):
        manifest.changed(preview=((1.0, 2.0, 3.0),))


def test_a_map_that_is_recorded_with_a_profile_serves() -> None:
    """As artifacts have it whose map was fitted when they were verified."""
    rows = ((1.0, 2.0, 3.0),) * 17
    record = Recorded(file="golden/a.json", sha256="0" * 64, preview=rows)
    assert plain_manifest(golden={"x": record}).colours == rows
    assert msgspec.to_builtins(Recorded(file="a", sha256="b")) == {"file": "a", "sha256": "b"}
