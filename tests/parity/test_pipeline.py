"""The whole path through the command lines against diffusers' WanPipeline, from the same seed or noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.artifacts import OWN_PROGRAMS, compile_fast, shared
from helpers.reference_models import relative_error
from helpers.solvers import WITH_REFERENCE
from helpers.whole_path import LATENTS, NEGATIVE, PROMPT, check, generate
from wanbuild.build import compile_artifact, convert
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.check.reference_pipeline import Reference
from wanbuild.conversion.convert_request import ConvertRequest

# diffusers hands arrays to NumPy in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


@pytest.fixture(scope="module")
def reference(toy_checkpoint: Path) -> Reference:
    return Reference(toy_checkpoint, "wan2.1-t2v")


@pytest.fixture(scope="module")
def without_guidance(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the toy without guidance, of two videos and another size."""
    options = BuildOptions(dtype="float32", vae_decode_chunk=2)

    def build(folder: Path) -> None:
        convert(ConvertRequest(toy_checkpoint, folder, {"transformer": "float32", "text_encoder": "float32"}))
        request = CompileRequest(folder, ["cpu"], [(32, 80)], [13], [False], num_videos=2, options=options)
        compile_fast(request, (*OWN_PROGRAMS, "decode_first", "decode_video"))

    return shared(tmp_path_factory, "nocfg-artifact", build)


@pytest.fixture(scope="module")
def bfloat16(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the toy with the default dtypes."""

    def build(folder: Path) -> None:
        convert(ConvertRequest(toy_checkpoint, folder))
        options = BuildOptions(loop="step")
        compile_artifact(CompileRequest(folder, ["cpu"], [(96, 64)], [9], [True], options=options), print)

    return shared(tmp_path_factory, "bfloat16-artifact", build)


@pytest.mark.parametrize("solver", WITH_REFERENCE)
def test_whole_path(
    reference: Reference, toy_artifact: Path, cli: Any, commands: Any, tmp_path: Path, solver: str
) -> None:
    """Once as a user runs it: in a process of its own."""
    wanrun = cli if solver == "unipc" else commands
    arguments = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 6, "guidance_scale": 4.0}
    expected = generate(reference, solver=solver, seed=7, **arguments)
    wanrun.succeeds(
        *("wanrun", "--artifact", toy_artifact, "--prompt", PROMPT, "--negative-prompt", NEGATIVE),
        *("--steps", 6, "--guidance-scale", 4, "--seed", 7, "--solver", solver),
        *("--save-latents", tmp_path / "latents.npy", "--output", tmp_path / "video.npy"),
    )
    check(np.load(tmp_path / "latents.npy"), np.load(tmp_path / "video.npy"), expected)


@pytest.mark.thorough
def test_without_guidance_two_videos(
    reference: Reference, without_guidance: Path, commands: Any, tmp_path: Path
) -> None:
    arguments = {"height": 80, "width": 32, "num_frames": 13, "num_inference_steps": 3, "guidance_scale": 1.0}
    arguments |= {"num_videos_per_prompt": 2}
    noise = np.random.default_rng(3).standard_normal((2, 16, 4, 10, 4)).astype(np.float32)
    np.save(tmp_path / "noise.npy", noise)
    expected = generate(reference, latents=torch.from_numpy(noise), **arguments)
    commands.succeeds(
        *("wanrun", "--artifact", without_guidance, "--prompt", PROMPT, "--guidance-scale", 1, "--steps", 3),
        *("--num-videos", 2, "--size", "32*80", "--frames", 13, "--latents", tmp_path / "noise.npy"),
        *("--save-latents", tmp_path / "latents.npy", "--output", tmp_path / "video.npy"),
        *("--timing-json", tmp_path / "timing.json"),
    )
    latents = np.load(tmp_path / "latents.npy")
    for index in range(2):
        check(latents, np.load(tmp_path / f"video-{index}.npy"), expected, video=index)
    timing = json.loads((tmp_path / "timing.json").read_text())
    assert timing["cache_misses"] == 0 and timing["cache_hits"] == 5


@pytest.mark.thorough
def test_two_videos_of_lcm(
    reference: Reference, without_guidance: Path, commands: Any, tmp_path: Path
) -> None:
    """Both are in each array of noise, the initial one and those of the steps."""
    arguments = {"height": 80, "width": 32, "num_frames": 13, "num_inference_steps": 3, "guidance_scale": 1.0}
    expected = generate(reference, solver="lcm", num_videos_per_prompt=2, seed=5, **arguments)
    commands.succeeds(
        *("wanrun", "--artifact", without_guidance, "--prompt", PROMPT, "--guidance-scale", 1, "--steps", 3),
        *("--num-videos", 2, "--size", "32*80", "--frames", 13, "--seed", 5, "--solver", "lcm"),
        *("--save-latents", tmp_path / "latents.npy", "--output", tmp_path / "video.npy"),
    )
    assert relative_error(np.load(tmp_path / "latents.npy"), expected.latents) < LATENTS


@pytest.mark.thorough
def test_bfloat16(
    bfloat16: Path, toy_artifact: Path, tmp_path: Path, record_property: Any, commands: Any
) -> None:
    """The default dtypes, against float32: reported, and bounded loosely, since random weights exaggerate."""
    outputs = {}
    for name, folder in (("float32", toy_artifact), ("bfloat16", bfloat16)):
        output, latents = tmp_path / f"{name}.npy", tmp_path / f"{name}-latents.npy"
        commands.succeeds(
            *("wanrun", "--artifact", folder, "--prompt", PROMPT, "--steps", 6, "--guidance-scale", 4),
            *("--save-latents", latents, "--output", output),
        )
        outputs[name] = np.load(latents), np.load(output).astype(np.float64)
    error = relative_error(outputs["bfloat16"][0], outputs["float32"][0])
    mean_square = np.mean(np.square(outputs["bfloat16"][1] - outputs["float32"][1]))
    psnr = 10 * np.log10(255**2 / mean_square)
    record_property("latents_relative_error", error)
    record_property("video_psnr_db", float(psnr))
    print(f"bfloat16 against float32: latents {error:.1e} relative, video {psnr:.1f} dB", flush=True)
    assert 1e-4 < error < 5e-2
    assert psnr > 25
