"""Defaults that a model brings: read from text, checked, and put in the places of its own."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from helpers.manifests import with_model
from helpers.refusals import json_error, refuses
from wanbuild import build as build_module
from wanbuild import cli as commands
from wanbuild.build import convert
from wanbuild.conversion import convert_request
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.conversion.defaults import check_defaults, parse_defaults, with_defaults
from wanbuild.conversion.provenance import recognised_lines
from wanbuild.toy.toy_checkpoint import write_toy
from wancli.console import run
from wanrun.artifact.manifest import read_manifest
from wanrun.codes import ErrorCode
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
    assert run(commands.wanbuild, [*arguments, "--default", text]) == 2
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
    assert run(commands.wanbuild, [*arguments, *given]) == 0
    manifest = read_manifest(artifact)
    defaults = manifest.model.default_options()
    assert (
        defaults.items()
        >= {
            "num_steps": 4,
            "guidance_scale": 1.0,
            "guidance_scale_2": 1.0,
            "solver": "euler",
            "flow_shift": 5.0,
            "timesteps": (1000.0, 937.5, 833.33, 625.0),
            "fps": 16,
        }.items()
    )
    assert defaults["boundary"] == 0.9
    _, ranges = schedule(defaults, manifest)
    assert [(part.first, part.last, part.guided) for part in ranges] == [(0, 2, 0), (2, 4, 0)]
    shown = CliRunner().invoke(commands.wanbuild, ["inspect", "--artifact", str(artifact)]).output
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
    assert run(commands.wanbuild, ["build", str(recipe)]) == 0
    manifest = read_manifest(tmp_path / "artifact")
    assert manifest.dtypes["transformer"].weights == "float32"
    changed: dict[str, Any] = {"guidance_scale": 1.0, "solver": "lcm", "flow_shift": 8.0, "num_steps": 3}
    changed["timesteps"] = (1000.0, 757.0, 522.0)
    assert manifest.model.default_options().items() >= changed.items()
