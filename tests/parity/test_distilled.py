"""A distilled model's own defaults, from convert to video through the command lines, against diffusers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.artifacts import shared
from helpers.reference_models import relative_error
from helpers.whole_path import LATENTS, LOOPS, PROMPT, check, generate
from wanbuild.check.reference_pipeline import Reference
from wanbuild.cli import wanbuild
from wancli.console import run
from wanrun.artifact.manifest import read_manifest

pytestmark = pytest.mark.thorough

# diffusers hands arrays to NumPy in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

LIGHTNING = (1000, 937.5, 833.33, 625)
CAUSVID = (1000, 757, 522)
SHAPE = {"height": 64, "width": 96, "num_frames": 9, "guidance_scale": 1.0}


def convert(checkpoint: Path, artifact: Path, *options: object) -> None:
    """Converts to float32, with defaults; programs that are there are kept."""
    dtypes = ("--weights-dtype", "float32", "--text-weights-dtype", "float32")
    arguments = ("convert", checkpoint, "--artifact", artifact, "--force", *dtypes, *options)
    assert run(wanbuild, list(map(str, arguments))) == 0


def defaults(**values: object) -> list[str]:
    return [text for name, value in values.items() for text in ("--default", f"{name}={value}")]


def commas(timesteps: Sequence[float]) -> str:
    return ",".join(map(str, timesteps))


@pytest.fixture(scope="module")
def distilled(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps at Lightning's timesteps, and the profile that follows from a guidance scale of 1."""

    def build(folder: Path) -> None:
        given = defaults(steps=4, guidance_scale=1, solver="euler", flow_shift=5, timesteps=commas(LIGHTNING))
        convert(toy_checkpoint, folder, *given)
        arguments = ["compile", "--artifact", folder, "--target", "cpu", "--size", "96x64", "--frames", 9]
        assert run(wanbuild, [*map(str, arguments), "--dtype", "float32"]) == 0

    return shared(tmp_path_factory, "distilled", build)


@pytest.fixture(scope="module")
def reference(toy_checkpoint: Path) -> Reference:
    return Reference(toy_checkpoint, "wan2.1-t2v")


@pytest.fixture
def make(commands: Any, tmp_path: Path) -> Callable[..., tuple[np.ndarray, np.ndarray, dict[str, Any]]]:
    """Runs wanrun; returns the latents, the frames and the metadata."""

    def call(artifact: Path, *options: object) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        latents, video = tmp_path / "latents.npy", tmp_path / "video.npy"
        commands.succeeds(
            *("wanrun", "--artifact", artifact, "--prompt", PROMPT, "--seed", 7, *options),
            *("--save-latents", latents, "--output", video, "--overwrite"),
        )
        metadata = json.loads((tmp_path / "video.npy.json").read_text())
        return np.load(latents), np.load(video), metadata

    return call


def test_the_profile_has_no_guidance(distilled: Path) -> None:
    manifest = read_manifest(distilled)
    assert list(manifest.profiles) == ["96x64x9-b1-nocfg"]
    assert manifest.model.defaults.timesteps == tuple(map(float, LIGHTNING))


@pytest.mark.parametrize("loop", LOOPS)
def test_default_timesteps(reference: Reference, distilled: Path, make: Any, loop: str) -> None:
    """A prompt is all that is given."""
    expected = generate(reference, solver="euler", timesteps=LIGHTNING, seed=7, **SHAPE)
    assert expected.count("transformer") == 4
    latents, frames, facts = make(distilled, "--loop", loop)
    check(latents, frames, expected)
    assert (facts["timesteps"], facts["num_steps"]) == (list(map(float, LIGHTNING)), 4)


def test_other_steps_drop_the_default_timesteps(reference: Reference, distilled: Path, make: Any) -> None:
    expected = generate(
        reference,
        solver="euler",
        flow_shift=5.0,
        seed=7,
        num_inference_steps=3,
        **SHAPE,
    )
    latents, frames, facts = make(distilled, "--steps", 3)
    check(latents, frames, expected)
    assert facts["num_steps"] == 3 and "timesteps" not in facts
    own = make(distilled)
    assert relative_error(own[0], expected.latents) > 1e-2  # the other grid is seen
    stated = make(distilled, "--steps", 4, "--solver", "euler", "--flow-shift", 5)
    assert np.array_equal(stated[0], own[0]) and stated[2] == own[2]


def test_lcm_from_the_seed_and_from_latents(
    reference: Reference, distilled: Path, make: Any, tmp_path: Path
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


@pytest.mark.parametrize("loop", LOOPS)
def test_default_timesteps_of_lcm(
    reference: Reference, distilled: Path, toy_checkpoint: Path, make: Any, tmp_path: Path, loop: str
) -> None:
    """Other defaults for the same programs: they are kept."""
    artifact = Path(shutil.copytree(distilled, tmp_path / "artifact"))
    convert(toy_checkpoint, artifact, *defaults(guidance_scale=1, solver="lcm", timesteps=commas(CAUSVID)))
    assert read_manifest(artifact).targets == read_manifest(distilled).targets
    expected = generate(reference, solver="lcm", timesteps=CAUSVID, seed=7, **SHAPE)
    latents, frames, facts = make(artifact, "--loop", loop)
    check(latents, frames, expected)
    assert (facts["solver"], facts["timesteps"]) == ("lcm", list(map(float, CAUSVID)))
    given = make(distilled, "--loop", loop, "--solver", "lcm", "--timesteps", commas(CAUSVID))
    assert np.array_equal(given[0], latents)  # on the command line they are the same


@pytest.mark.usefixtures("encoders_compiled_once")
def test_verify_compares_with_the_checkpoint_s_scheduler(
    distilled: Path, toy_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a record is made and replayed, whatever the defaults."""
    artifact = Path(shutil.copytree(distilled, tmp_path / "artifact"))
    convert(toy_checkpoint, artifact, *defaults(guidance_scale=1, solver="lcm", timesteps=commas(CAUSVID)))
    arguments = ["verify", "--artifact", str(artifact)]
    file = tmp_path / "found.json"
    source = ["--source", str(toy_checkpoint), "--steps", "2", "--json", str(file)]
    for options in (source, ["--record"], []):
        assert run(wanbuild, [*arguments, *options]) == 0
    assert json.loads(file.read_text())["final latents"]["error"] < LATENTS
    assert "digests equal" in capsys.readouterr().out
