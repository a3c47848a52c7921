"""Defaults that a model brings, and published ways to sample: read, checked, in place of its own."""

from __future__ import annotations

import errno
import itertools
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from helpers.manifests import with_model
from helpers.refusals import json_error, refuses
from wanbuild import build as build_module
from wanbuild.build import convert
from wanbuild.cli import wanbuild
from wanbuild.conversion import convert_request
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.conversion.defaults import check_defaults, parse_defaults, with_defaults
from wanbuild.conversion.provenance import recognised_lines
from wanbuild.conversion.sampling import sampling_doubts, with_sampling
from wanbuild.published.samplings import SAMPLINGS
from wanbuild.recipe import fingerprint, read_recipe
from wanbuild.toy.toy_checkpoint import write_toy
from wancli.console import run
from wanrun.artifact.manifest import read_manifest
from wanrun.codes import ErrorCode
from wanrun.denoising.noise import Noise
from wanrun.denoising.solvers import COLUMNS, solver_table
from wanrun.denoising.steps import schedule
from wanrun.errors import UsageError

OWN: Mapping[str, Any] = {
    "num_steps": 40,
    "guidance_scale": 4.0,
    "flow_shift": 12.0,
    "solver": "unipc",
    "fps": 16,
    "negative_prompt": "blurry",
}
OF_TWO: Mapping[str, Any] = {**OWN, "guidance_scale_2": 3.0, "boundary": 0.875}
LIGHTNING = ("steps=4", "guidance_scale=1", "solver=euler", "flow_shift=5", "timesteps=1000,937.5,833.33,625")


def test_nothing_given() -> None:
    check_defaults({})
    assert with_defaults(OWN, {}) == OWN
    assert with_defaults(OF_TWO, {}) == OF_TWO
    # A checkpoint's own shift is its business, whatever a table would say of it.
    assert with_defaults({**OWN, "flow_shift": 1e-40}, {})["flow_shift"] == 1e-40


def test_other_tools_names_of_defaults() -> None:
    given = ["num_inference_steps=4", "sample-shift=5", "cfg=1", "boundary_ratio=0.9"]
    assert parse_defaults(given) == {"steps": 4, "flow_shift": 5.0, "guidance_scale": 1.0, "boundary": 0.9}
    with refuses("conflict", what="--default steps "):
        parse_defaults(["steps=4", "num_steps=4"])


def test_a_distilled_model_s() -> None:
    given = parse_defaults(LIGHTNING)
    timesteps = [1000.0, 937.5, 833.33, 625.0]
    assert given == {
        "steps": 4,
        "guidance_scale": 1.0,
        "solver": "euler",
        "flow_shift": 5.0,
        "timesteps": timesteps,
    }
    check_defaults(given)
    changed = {"num_steps": 4, "guidance_scale": 1.0, "solver": "euler", "flow_shift": 5.0}
    expected = {**OWN, **changed, "timesteps": timesteps}
    assert with_defaults(OWN, given) == expected
    # Guidance that is given alone is both experts', as on wanrun's command line.
    assert with_defaults(OF_TWO, given) == {
        **expected,
        "guidance_scale_2": 1.0,
        "boundary": 0.875,
    }


def test_the_number_of_timesteps_is_that_of_the_steps() -> None:
    assert with_defaults(OWN, {"timesteps": (1000, 757, 522), "solver": "lcm"})["num_steps"] == 3


def test_experts() -> None:
    given = {"boundary": 0, "guidance_scale_2": 2, "fps": 24, "guidance_end": 0.5}
    defaults = with_defaults(OF_TWO, given)
    assert (defaults["boundary"], defaults["guidance_scale_2"], defaults["fps"]) == (0.0, 2.0, 24.0)
    assert (defaults["guidance_scale"], defaults["guidance_end"]) == (4.0, 0.5)
    for one in ({"boundary": 0.9}, {"guidance_scale_2": 2.0}):
        check_defaults(one)  # only the checkpoint tells
        with refuses("no_effect", what=f"default {next(iter(one))} "):
            with_defaults(OWN, one)


@pytest.mark.parametrize(
    ("code", "given", "parts"),
    [
        ("out_of_range", {"steps": 0}, {"what": "steps", "expected": "1 to 10000", "found": 0}),
        ("out_of_range", {"steps": 10_001}, {"what": "steps", "expected": "1 to 10000", "found": 10001}),
        ("out_of_range", {"guidance_scale": math.nan}, {"what": "guidance_scale", "found": "nan"}),
        ("out_of_range", {"boundary": 1.1}, {"what": "boundary", "expected": "0 to 1", "found": 1.1}),
        ("out_of_range", {"fps": 0.0}, {"what": "fps", "expected": "0.1 to 240", "found": 0.0}),
        ("out_of_range", {"flow_shift": 0.0}, {"what": "flow_shift", "expected": "positive", "found": 0.0}),
        ("out_of_range", {"flow_shift": 1e9, "steps": 50}, {"what": "float32"}),
        # if a user drops them
        ("out_of_range", {"flow_shift": 1e9, "timesteps": [*range(50, 0, -1)]}, {"what": "float32"}),
        ("out_of_range", {"flow_shift": math.inf}, {"what": "flow_shift"}),
        ("invalid_value", {"solver": "heun"}, {"what": "solver", "expected": "unipc or dpm++ or "}),
        ("invalid_value", {"timesteps": [500, 1000]}, {"what": "timesteps", "expected": "at most 1000"}),
        ("out_of_range", {"timesteps": []}, {"what": "timesteps", "expected": "1 to 10000", "found": "[]"}),
        ("out_of_range", {"guidance_end": 0.0}, {"what": "guidance_start and guidance_end"}),
        ("wrong_type", {"fps": True}, {"what": "fps", "expected": "a number"}),
        ("conflict", {"timesteps": [1000, 500], "steps": 3}, {"what": "steps and timesteps", "expected": 2}),
        (
            "no_effect",
            {"guidance_scale": 1.0, "guidance_scale_2": 3.0},
            {"what": "guidance_scale_2", "expected": "guidance_scale above 1"},
        ),
    ],
)
def test_refusals(code: ErrorCode, given: Mapping[str, Any], parts: dict[str, object]) -> None:
    """Before a checkpoint is fetched; and of two experts nothing else is said."""
    with refuses(code, **parts) as caught:
        check_defaults(given)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError):
        with_defaults(OF_TWO, given)


def test_what_fits_neither_with_the_checkpoint() -> None:
    """The solver is its own: unipc lowers 1000, so that the second sigma is above the first."""
    given = {"timesteps": [1000, 999.9999]}
    check_defaults(given)
    with refuses("out_of_range", what="timesteps"):
        with_defaults(OWN, given)


@pytest.mark.parametrize(
    ("text", "code", "name", "expected"),
    [
        ("steps", "invalid_value", "--default ", "steps, guidance_scale, "),
        ("step=4", "invalid_value", "--default ", "steps, guidance_scale, "),
        ("=4", "invalid_value", "--default ", "steps, guidance_scale, "),
        ("steps=4.0", "wrong_type", "--default steps ", "integer"),
        ("steps=", "wrong_type", "--default steps ", "integer"),
        ("fps=fast", "wrong_type", "--default fps ", "number"),
        ("timesteps=1000,,5", "wrong_type", "--default timesteps ", "list of numbers"),
        ("timesteps=1000;5", "wrong_type", "--default timesteps ", "list of numbers"),
        ("solver=heun", "invalid_value", "default cannot be used: solver ", "unipc or dpm++"),
        ("timesteps=5,6", "invalid_value", "timesteps ", "1000"),
        ("boundary=0.9", "no_effect", "default boundary ", ""),
    ],
)
def test_the_command_line_refuses(
    toy_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    code: str,
    name: str,
    expected: str,
) -> None:
    arguments = ["convert", str(toy_checkpoint), "--artifact", str(tmp_path / "artifact"), "--json-errors"]
    assert run(wanbuild, [*arguments, "--default", text]) == 2
    error = json_error(capsys.readouterr().err)
    assert error["code"] == code and name in error["message"] and expected in error.get("expected", "")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_fetched_for_defaults_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locate(*arguments: object) -> None:
        raise AssertionError("the source is looked for")

    monkeypatch.setattr(convert_request, "locate_source", locate)
    request = ConvertRequest("owner/name", tmp_path / "artifact", defaults={"solver": "heun"})
    with refuses("invalid_value", what="solver"):
        convert(request)


@pytest.mark.slow
def test_the_manifest_and_what_shows_it(tmp_path: Path) -> None:
    """From the command line and from a recipe; the content's digest covers the defaults."""
    write_toy(tmp_path / "toy", "wan2.2-t2v")
    given = [text for default in LIGHTNING for text in ("--default", default)]
    artifact = tmp_path / "artifact"
    arguments = ["convert", str(tmp_path / "toy"), "--artifact", str(artifact), "--default", "boundary=0.9"]
    assert run(wanbuild, [*arguments, *given]) == 0
    manifest = read_manifest(artifact)
    defaults = manifest.model.default_options()
    expected = {
        "num_steps": 4,
        "guidance_scale": 1.0,
        "guidance_scale_2": 1.0,
        "solver": "euler",
        "flow_shift": 5.0,
        "timesteps": (1000.0, 937.5, 833.33, 625.0),
        "fps": 16,
        "boundary": 0.9,
    }
    assert defaults.items() >= expected.items()
    _, ranges = schedule(defaults, manifest)
    assert [(part.first, part.last, part.guided) for part in ranges] == [(0, 2, 0), (2, 4, 0)]
    shown = CliRunner().invoke(wanbuild, ["inspect", "--artifact", str(artifact)]).output
    (line,) = (line for line in shown.splitlines() if "euler" in line)
    numbers = ["4", "1000", "937.5", "833.33", "625", "1", "1", "0.9", "5"]
    assert re.findall(r"[\d.]+", line.partition("euler")[2])[: len(numbers)] == numbers

    plain = convert(ConvertRequest(tmp_path / "toy", tmp_path / "plain"))
    assert plain.content_digest != manifest.content_digest
    assert plain.model.defaults.timesteps is None


def test_a_shift_that_the_scheduler_s_file_lacks_is_told(toy_artifact: Path) -> None:
    manifest = read_manifest(toy_artifact)
    assert not [*recognised_lines(manifest)]
    config = {**manifest.configs["scheduler"], "flow_shift": None}
    lacking = manifest.changed(configs={**manifest.configs, "scheduler": config})
    lacking = with_model(lacking, {"flow_shift": 1.0})
    (told,) = recognised_lines(lacking, ["fps"])
    assert told.endswith("--default flow_shift=5")
    assert not [*recognised_lines(lacking, ["flow_shift"])]


@pytest.mark.slow
def test_a_recipe_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wanbuild.check import verify

    monkeypatch.setattr(build_module, "compile_artifact", lambda *arguments, **options: None)
    monkeypatch.setattr(verify, "record", lambda artifact, report: None)
    write_toy(tmp_path / "toy")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'source = "toy"\nartifact = "artifact"\n[convert]\nweights_dtype = "float32"\n[convert.defaults]\n'
        'guidance_scale = 1\nsolver = "lcm"\ntimesteps = [1000, 757, 522]\nflow_shift = 8\n'
    )
    assert run(wanbuild, ["build", str(recipe)]) == 0
    manifest = read_manifest(tmp_path / "artifact")
    assert manifest.dtypes["transformer"].weights == "float32"
    changed: dict[str, Any] = {"guidance_scale": 1.0, "solver": "lcm", "flow_shift": 8.0, "num_steps": 3}
    changed["timesteps"] = (1000.0, 757.0, 522.0)
    assert manifest.model.default_options().items() >= changed.items()


# --- published ways to sample distilled models ---

SHAPE = (1, 16, 2, 4, 6)


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
    arguments = ["convert", str(tmp_path / "toy"), "--artifact", str(tmp_path / "a")]
    arguments += ["--sampling", "causvid-3"]
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
