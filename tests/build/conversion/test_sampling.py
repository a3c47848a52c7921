"""The published ways to sample distilled models: beside their formulas, and how a conversion takes one."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.refusals import refuses
from wanbuild.cli import wanbuild
from wanbuild.conversion.defaults import with_defaults
from wanbuild.conversion.sampling import sampling_doubts, with_sampling
from wanbuild.published.samplings import SAMPLINGS
from wanbuild.recipe import fingerprint, read_recipe
from wanbuild.toy.toy_checkpoint import write_toy
from wancli.console import run
from wanrun.artifact.manifest import read_manifest
from wanrun.codes import ErrorCode
from wanrun.denoising.noise import Noise
from wanrun.denoising.solvers import COLUMNS, solver_table
from wanrun.denoising.steps import expert_ranges

SHAPE = (1, 16, 2, 4, 6)
OWN: dict[str, Any] = {
    "num_steps": 50,
    "guidance_scale": 5.0,
    "flow_shift": 3.0,
    "solver": "unipc",
    "fps": 16,
}


def velocity(x: np.ndarray, timestep: float) -> np.ndarray:
    """A model, with other values at each timestep."""
    return np.sin(3 * x + timestep / 100) + 0.5 * x


def made(name: str, noise: Noise) -> np.ndarray:
    """What the table of a sampling makes, as the device and the sampler do it."""
    given = with_defaults(OWN, SAMPLINGS[name])
    table = solver_table(given["solver"], given["num_steps"], given["flow_shift"], 1000, given["timesteps"])
    x = table.start * noise(SHAPE).astype(np.float64)
    last = m1 = m2 = np.zeros_like(x)
    for row, timestep, weight in zip(table.coefficients, table.timesteps, table.noise, strict=True):
        step = dict(zip(COLUMNS, row.astype(np.float64), strict=True))
        m0 = x - step["sigma"] * velocity(x, float(timestep))
        last = (
            step["c_x"] * x + step["c_last"] * last + step["c_0"] * m0 + step["c_1"] * m1 + step["c_2"] * m2
        )
        x = step["p_x"] * last + step["p_0"] * m0 + step["p_1"] * m1
        if table.noise.any():
            x = x + weight * noise(SHAPE)
        m1, m2 = m0, m1
    return x


@pytest.mark.parametrize(
    ("name", "sigmas"),
    [
        ("lightning-4", [1, 0.9375, 0.8333333, 0.625, 0]),
        ("causvid-3", [1, 0.75675676, 0.52173913, 0]),
        ("fastwan-3", [1, 0.75675676, 0.52173913, 0]),
        ("self-forcing-4", [1, 0.9375, 0.8333333, 0.625, 0]),
        ("rcm-4", [0.98765432, 0.93378, 0.85290, 0.60898, 0]),
        ("rcm-4-ode", [0.98765432, 0.93378, 0.85290, 0.60898, 0]),
        ("rcm-4-i2v", [0.99502488, 0.93378, 0.85290, 0.60898, 0]),
        ("rcm-4-i2v-ode", [0.99502488, 0.93378, 0.85290, 0.60898, 0]),
    ],
)
def test_beside_the_formula(name: str, sigmas: list[float]) -> None:
    noise, timesteps = Noise(7), SAMPLINGS[name]["timesteps"]
    if SAMPLINGS[name]["solver"] == "dmd":
        assert timesteps == (1000, 757, 522)
    else:
        np.testing.assert_allclose(np.array(timesteps) / 1000, sigmas[:-1], atol=1e-5)
        sigmas = [*(timestep / 1000 for timestep in timesteps), 0]
    x = (sigmas[0] if name.startswith("rcm") else 1) * noise(SHAPE).astype(np.float64)
    for (sigma, following), timestep in zip(itertools.pairwise(sigmas), timesteps, strict=True):
        v = velocity(x, timestep)
        if name == "lightning-4" or name.endswith("ode"):
            x = x + (following - sigma) * v
        else:
            x = (1 - following) * (x - sigma * v) + following * noise(SHAPE)
    assert np.abs(made(name, Noise(7)) - x).max() < 2e-6


def test_two_experts_take_two_steps_each() -> None:
    table = solver_table("euler", 4, 5.0, 1000, SAMPLINGS["lightning-4"]["timesteps"])
    options = {"boundary": 0.875, "guidance_scale": 1.0, "guidance_scale_2": 1.0}
    ranges = expert_ranges(table, ["transformer", "transformer_2"], options, 1000)
    assert [(part.first, part.last) for part in ranges] == [(0, 2), (2, 4)]


def test_what_is_given_replaces_a_value(tmp_path: Path) -> None:
    assert with_sampling(None, {"steps": 3}) == {"steps": 3}
    assert with_sampling("lightning-4", {"flow_shift": 8.0})["flow_shift"] == 8.0
    file = tmp_path / "mine.toml"
    file.write_text('solver = "euler"\ntimesteps = [1000, 500]\n')
    assert with_sampling(str(file), {"fps": 8}) == {"solver": "euler", "timesteps": [1000, 500], "fps": 8}


@pytest.mark.parametrize(
    ("content", "code", "found"),
    [
        ("steps = [", "unreadable", "Invalid value"),
        ("guidance = 3", "unknown_parameter", "'guidance'"),
        (None, "unreadable", os.strerror(errno.ENOENT)),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, content: str | None, code: ErrorCode, found: str) -> None:
    file = tmp_path / "mine.toml"
    if content is not None:
        file.write_text(content)
    with refuses(code, what=file, found=found):
        with_sampling(str(file), {})
    with refuses("unknown_name", what="'lightning'", expected="lightning-4, "):
        with_sampling("lightning", {})


def test_a_model_that_it_is_not_for_is_a_warning() -> None:
    base, distilled = (f"Wan-AI/Wan2.1-T2V-14B{end}" for end in ("-Diffusers", "-Distilled-Diffusers"))

    def doubts(sampling: str | None, repository: str | None = None, merged: bool = False) -> int:
        return len([*sampling_doubts(sampling, "t2v", repository, merged)])

    assert doubts(None) == doubts("mine.toml") == doubts("rcm-4") == doubts("causvid-3") == 0
    assert doubts("lightning-4") == doubts("rcm-4-i2v") == doubts("rcm-4-i2v-ode", merged=True) == 1
    assert doubts("lightning-4", base) == doubts("causvid-3", base) == 1
    assert doubts("lightning-4", base, merged=True) == doubts("causvid-3", distilled) == 0


@pytest.mark.slow
def test_the_commands_take_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_toy(tmp_path / "toy")
    arguments = [
        "convert",
        str(tmp_path / "toy"),
        "--artifact",
        str(tmp_path / "a"),
        "--sampling",
        "causvid-3",
    ]
    assert run(wanbuild, arguments) == 0
    assert "warning" not in capsys.readouterr().err
    assert run(wanbuild, [*arguments[:-1], "rcm-4-i2v", "--force"]) == 0
    assert capsys.readouterr().err.count("warning: ") == 1
    assert run(wanbuild, [*arguments, "--force"]) == 0
    expected = {**SAMPLINGS["causvid-3"], "num_steps": 3}
    assert read_manifest(tmp_path / "a").model.default_options().items() >= expected.items()
    recipe, file = tmp_path / "recipe.toml", tmp_path / "mine.toml"
    file.write_text("flow_shift = 8")
    recipe.write_text('source = "toy"\nartifact = "b"\n[convert]\nsampling = "mine.toml"\n')
    read = read_recipe(recipe)
    assert read.convert["sampling"] == str(file)
    before = fingerprint(read)
    file.write_text("flow_shift = 12.5")
    assert fingerprint(read) != before
