"""The text to video toy's other profiles, dtypes and defaults, from convert to video, against diffusers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.artifacts import OWN_PROGRAMS, compile_fast, shared
from helpers.reference_models import relative_error
from helpers.whole_path import LATENTS, LOOPS, PROMPT, check, generate
from wanbuild.build import compile_artifact
from wanbuild.build import convert as make_artifact
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.check.reference_pipeline import Reference
from wanbuild.cli import wanbuild
from wanbuild.conversion.convert_request import ConvertRequest
from wancli.console import run
from wanrun.artifact.manifest import read_manifest

pytestmark = pytest.mark.thorough

LIGHTNING = (1000, 937.5, 833.33, 625)
CAUSVID = (1000, 757, 522)
SHAPE = {"height": 64, "width": 96, "num_frames": 9, "guidance_scale": 1.0}
TWO = {"height": 80, "width": 32, "num_frames": 13, "guidance_scale": 1.0, "num_videos_per_prompt": 2}

Make = Callable[..., tuple[np.ndarray, np.ndarray, dict[str, Any]]]


@pytest.fixture(scope="module")
def reference(toy_checkpoint: Path) -> Reference:
    return Reference(toy_checkpoint, "wan2.1-t2v")


@pytest.fixture
def make(commands: Any, tmp_path: Path) -> Make:
    """Runs wanrun; returns the latents, the frames, of several videos the first one's, and the metadata."""

    def call(artifact: Path, *options: object) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        latents, video = tmp_path / "latents.npy", tmp_path / "video.npy"
        commands.succeeds(
            *("wanrun", "--artifact", artifact, "--prompt", PROMPT, "--seed", 7, *options),
            *("--save-latents", latents, "--output", video, "--overwrite"),
        )
        video = video if video.exists() else tmp_path / "video-0.npy"
        return np.load(latents), np.load(video), json.loads(Path(f"{video}.json").read_text())

    return call


@pytest.fixture(scope="module")
def without_guidance(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the toy without guidance, of two videos and another size."""
    options = BuildOptions(dtype="float32", vae_decode_chunk=2)

    def build(folder: Path) -> None:
        stored = dict.fromkeys(("transformer", "text_encoder"), "float32")
        make_artifact(ConvertRequest(toy_checkpoint, folder, stored))
        request = CompileRequest(folder, ["cpu"], [(32, 80)], [13], [False], num_videos=2, options=options)
        compile_fast(request, (*OWN_PROGRAMS, "decode_first", "decode_video"))

    return shared(tmp_path_factory, "nocfg-artifact", build)


@pytest.fixture(scope="module")
def bfloat16(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the toy with the default dtypes."""

    def build(folder: Path) -> None:
        make_artifact(ConvertRequest(toy_checkpoint, folder))
        options = BuildOptions(loop="step")
        compile_artifact(CompileRequest(folder, ["cpu"], [(96, 64)], [9], [True], options=options), print)

    return shared(tmp_path_factory, "bfloat16-artifact", build)


@pytest.mark.parametrize("solver", ["unipc", "lcm"])
def test_two_videos_without_guidance(
    reference: Reference, without_guidance: Path, make: Make, tmp_path: Path, solver: str
) -> None:
    """From given noise, and from a seed: of lcm both are in each array of noise, the steps' too."""
    noise = np.random.default_rng(3).standard_normal((2, 16, 4, 10, 4)).astype(np.float32)
    np.save(tmp_path / "noise.npy", noise)
    given: dict[str, Any] = {"latents": torch.from_numpy(noise)} if solver == "unipc" else {"seed": 7}
    expected = generate(reference, solver=solver, num_inference_steps=3, **given, **TWO)
    latents, frames, _ = make(
        without_guidance,
        *("--guidance-scale", 1, "--steps", 3, "--solver", solver),
        *("--num-videos", 2, "--size", "32*80", "--frames", 13),
        *(("--latents", tmp_path / "noise.npy") if solver == "unipc" else ()),
        *("--timing-json", tmp_path / "timing.json"),
    )
    for index, video in enumerate((frames, np.load(tmp_path / "video-1.npy"))):
        check(latents, video, expected, video=index)
    timing = json.loads((tmp_path / "timing.json").read_text())
    assert timing["cache_misses"] == 0 and timing["cache_hits"] == 5


def test_bfloat16(bfloat16: Path, toy_artifact: Path, record_property: Any, make: Make) -> None:
    """The default dtypes, against float32: reported, and bounded loosely, since random weights exaggerate."""
    (latents, frames, _), (found, coarse, _) = (
        make(folder, "--steps", 6, "--guidance-scale", 4) for folder in (toy_artifact, bfloat16)
    )
    error = relative_error(found, latents)
    psnr = 10 * np.log10(255**2 / np.mean(np.square(coarse.astype(np.float64) - frames)))
    record_property("latents_relative_error", error)
    record_property("video_psnr_db", float(psnr))
    print(f"bfloat16 against float32: latents {error:.1e} relative, video {psnr:.1f} dB", flush=True)
    assert 1e-4 < error < 5e-2
    assert psnr > 25


def convert(checkpoint: Path, artifact: Path, **defaults: object) -> None:
    """Converts to float32, with defaults; programs that are there are kept."""
    dtypes = ("--weights-dtype", "float32", "--text-weights-dtype", "float32")
    options = [text for name, value in defaults.items() for text in ("--default", f"{name}={value}")]
    arguments = ("convert", checkpoint, "--artifact", artifact, "--force", *dtypes, *options)
    assert run(wanbuild, list(map(str, arguments))) == 0


def commas(timesteps: Sequence[float]) -> str:
    return ",".join(map(str, timesteps))


@pytest.fixture(scope="module")
def distilled(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps at Lightning's timesteps, and the profile that follows from a guidance scale of 1."""

    def build(folder: Path) -> None:
        given = {"solver": "euler", "flow_shift": 5, "timesteps": commas(LIGHTNING)}
        convert(toy_checkpoint, folder, steps=4, guidance_scale=1, **given)
        arguments = ["compile", "--artifact", folder, "--target", "cpu", "--size", "96x64", "--frames", 9]
        assert run(wanbuild, [*map(str, arguments), "--dtype", "float32"]) == 0

    return shared(tmp_path_factory, "distilled", build)


@pytest.fixture
def of_lcm(distilled: Path, toy_checkpoint: Path, tmp_path: Path) -> Path:
    """Other defaults for the same programs."""
    artifact = Path(shutil.copytree(distilled, tmp_path / "artifact"))
    convert(toy_checkpoint, artifact, guidance_scale=1, solver="lcm", timesteps=commas(CAUSVID))
    return artifact


def test_default_timesteps(reference: Reference, distilled: Path, make: Make) -> None:
    """A prompt is all that is given; other steps drop them."""
    manifest = read_manifest(distilled)
    assert list(manifest.profiles) == ["96x64x9-b1-nocfg"]
    assert manifest.model.defaults.timesteps == tuple(map(float, LIGHTNING))
    expected = generate(reference, solver="euler", timesteps=LIGHTNING, seed=7, **SHAPE)
    assert expected.count("transformer") == 4
    for loop in LOOPS:
        latents, frames, facts = make(distilled, "--loop", loop)
        check(latents, frames, expected)
        assert (facts["timesteps"], facts["num_steps"]) == (list(map(float, LIGHTNING)), 4)

    grid = {"solver": "euler", "flow_shift": 5.0, "num_inference_steps": 3}
    expected = generate(reference, seed=7, **grid, **SHAPE)
    latents, frames, facts = make(distilled, "--steps", 3)
    check(latents, frames, expected)
    assert facts["num_steps"] == 3 and "timesteps" not in facts
    own = make(distilled)
    assert relative_error(own[0], expected.latents) > 1e-2  # the other grid is seen
    stated = make(distilled, "--steps", 4, "--solver", "euler", "--flow-shift", 5)
    assert np.array_equal(stated[0], own[0]) and stated[2] == own[2]


def test_lcm_from_the_seed_and_from_latents(
    reference: Reference, distilled: Path, make: Make, tmp_path: Path
) -> None:
    """On its class's grid. Where initial noise is given, the seed's first noise is that of the first step."""
    arguments = {"solver": "lcm", "flow_shift": 5.0, "num_inference_steps": 3, **SHAPE}
    expected = generate(reference, seed=7, **arguments)
    results = [make(distilled, "--solver", "lcm", "--steps", 3, "--loop", loop) for loop in LOOPS]
    for latents, frames, _ in results:
        check(latents, frames, expected)
    assert relative_error(results[0][0], results[1][0]) < 1e-6

    noise = np.random.default_rng(3).standard_normal(results[0][0].shape).astype(np.float32)
    np.save(tmp_path / "noise.npy", noise)
    expected = generate(reference, seed=7, latents=torch.from_numpy(noise), **arguments)
    options = ("--solver", "lcm", "--steps", 3, "--latents", tmp_path / "noise.npy")
    check(*make(distilled, *options)[:2], expected)


def test_default_timesteps_of_lcm(reference: Reference, distilled: Path, of_lcm: Path, make: Make) -> None:
    assert read_manifest(of_lcm).targets == read_manifest(distilled).targets
    expected = generate(reference, solver="lcm", timesteps=CAUSVID, seed=7, **SHAPE)
    for loop in LOOPS:
        latents, frames, facts = make(of_lcm, "--loop", loop)
        check(latents, frames, expected)
        assert (facts["solver"], facts["timesteps"]) == ("lcm", list(map(float, CAUSVID)))
        given = make(distilled, "--loop", loop, "--solver", "lcm", "--timesteps", commas(CAUSVID))
        assert np.array_equal(given[0], latents)  # on the command line they are the same


@pytest.mark.usefixtures("encoders_compiled_once")
def test_verify_compares_with_the_checkpoint_s_scheduler(
    of_lcm: Path, toy_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a record is made and replayed, whatever the defaults."""
    file = tmp_path / "found.json"
    source = ["--source", str(toy_checkpoint), "--steps", "2", "--json", str(file)]
    for options in (source, ["--record"], []):
        assert run(wanbuild, ["verify", "--artifact", str(of_lcm), *options]) == 0
    assert json.loads(file.read_text())["final latents"]["error"] < LATENTS
    assert "digests equal" in capsys.readouterr().out
