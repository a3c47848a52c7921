"""``wanbuild plan``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from wanbuild import cli
from wanbuild.build_options import PlanRequest
from wanbuild.plan.plan import Plan, make_plan, parse_chip
from wanbuild.plan.plan_report import as_json, table
from wanbuild.plan.prediction import BOUNDS
from wanbuild.plan.subject import read_subject
from wanbuild.targets.chip import Chip
from wanbuild.targets.chips import CHIPS
from wancli.console import run
from wanrun.artifact.programs import Kernels
from wanrun.errors import UsageError

CPU = Chip(
    name="cpu",
    platform="cpu",
    device_kind="cpu",
    memory_bytes=2**30,
    bf16=1e11,
    fp8=0,
    float32=1e11,
    matrix_unit=16,
    bandwidth=1e10,
    link=1e9,
    host_link=1e10,
    kernels=Kernels("cpu", "winograd", weight_bits=True, image_multiple=1),
)
"""Made-up figures: a device that is always there."""


def planned(subject: str, target: str, choices: Mapping[str, Any] | None = None, **options: Any) -> Plan:
    return make_plan(read_subject(subject), PlanRequest(target, choices or {}, **options))


def invoked(*arguments: str) -> str:
    outcome = CliRunner().invoke(cli.wanbuild, ["plan", *arguments], catch_exceptions=False)
    assert outcome.exit_code == 0
    return outcome.output


@pytest.mark.slow
def test_a_plan_of_a_published_model_needs_no_file() -> None:
    output = invoked("wan2.2-t2v-a14b", "--target", "v7x-8")
    lines = output.splitlines()
    assert all(
        text in lines[0]
        for text in ("wan2.2-t2v-a14b, 1280x720x81", " 40 steps", "v7x-8", "data=2,context=4")
    )
    assert max(map(len, lines)) <= 110
    for start in ("encode_text", "prepare", "denoise_step", "decode_video", "memory", "video", "start"):
        assert any(line.startswith(start) for line in lines)
    assert "89% in attention" in output


@pytest.mark.slow
def test_the_json_has_numbers_and_their_units() -> None:
    data = json.loads(invoked("wan2.1-i2v-14b-480p", "--target", "h200", "--json", "--steps", "4"))
    assert data.keys() == {
        *("model", "variant", "shape", "steps", "chip", "devices", "mesh", "step_seconds", "video_seconds"),
        *("memory", "start_seconds", "download", "programs", "meshes", "efficiency"),
    }
    assert (data["steps"], data["devices"], data["mesh"]) == (4, 1, {})
    names = ["encode_text", "encode_image", "encode_video", "prepare", "denoise_step"]
    names += ["decode_first", "decode_video"]
    assert list(data["programs"]) == names
    for program in data["programs"].values():
        terms = [program[f"{name}_seconds"] for name in BOUNDS]
        assert program["seconds"] == pytest.approx(sum(terms))
    total = sum(program["seconds"] * program["calls"] for program in data["programs"].values())
    assert data["video_seconds"] == pytest.approx(total)
    assert data["memory"]["fits"]
    assert data["download"]["weights_bytes"] == pytest.approx(46.4e9, rel=1e-2)


@pytest.mark.slow
def test_all_meshes_are_listed() -> None:
    made = planned("wan2.1-t2v-14b", "v5e-8", all_meshes=True)
    assert len(made.others) == 30
    lines = table(made)
    assert sum("too much" in line for line in lines) == sum(not one.need.fits for one in made.others) > 0
    assert len(as_json(made)["meshes"]) == 30


@pytest.mark.slow
def test_the_options_of_the_request_come_before_those_of_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "fast.toml"
    recipe.write_text(
        'source = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"\nartifact = "a"\n'
        "[convert.defaults]\nsteps = 4\nguidance_scale = 1.0\n"
        '[compile]\nsizes = ["480x832"]\nframes = [33]\nloop = "scan"\nmesh = "context=4"\n'
    )
    made = planned(str(recipe), "v5e-8")
    shape = made.generation.shape
    assert (shape.width, shape.height, shape.num_frames, shape.guidance) == (480, 832, 33, False)
    assert (made.generation.steps, made.chosen.sizes) == (4, {"context": 4})
    # The devices of a mesh share the columns of each of nine pieces, and of their history.
    calls = [(call.name, call.times) for call in made.generation.calls]
    assert calls[-2:] == [("denoise_loop", 1), ("decode_video", 9)]
    alone, shared = (made.generation.carried("decode_video", sizes) for sizes in ({}, {"context": 4}))
    assert shared == alone / 4 and made.chosen.figures["decode_video"].temporaries > 0
    other = planned(
        str(recipe), "v5e-8", {"sizes": (832, 480), "guidance": True, "mesh": {"data": 2}}, steps=8
    )
    assert (other.generation.shape.width, other.generation.shape.guidance) == (832, True)
    assert (other.generation.steps, other.chosen.sizes) == (8, {"data": 2})


@pytest.mark.thorough
def test_a_loop_takes_as_long_as_its_steps() -> None:
    """Of 40 steps with skip-layer guidance seven have a third pass, if a request says no other."""
    step, loop = (
        planned("wan2.2-t2v-a14b", "h200", {"sizes": (832, 480), "loop": form, "guiders": guiders})
        for form, guiders in (("step", ()), ("scan", ["skip-layer"]))
    )
    assert loop.chosen.step == pytest.approx(step.chosen.step * 87 / 80, rel=1e-3)
    assert loop.chosen.video - step.chosen.video == pytest.approx(step.chosen.step * 3.5, rel=1e-2)
    assert [call.times for call in loop.generation.calls if call.name == "denoise_loop"] == [2]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("wan9", "--target", "v5e"), "there is no model 'wan9'; expected a recipe (.toml)"),
        (
            ("wan2.1-t2v-14b", "--target", "tpu"),
            "there is no chip 'tpu' to plan for; expected one of v4, v5e",
        ),
        (
            ("wan2.1-t2v-14b", "--target", "v5e-7"),
            "v5e does not come with 7 devices; expected one of 1, 2, 4",
        ),
        (
            ("wan2.1-t2v-14b", "--target", "v5e", "--mesh", "context=5"),
            "v5e does not come with 5 devices; expected one of 1, 2, 4",
        ),
        (
            ("wan2.1-t2v-14b", "--target", "v5e-8", "--mesh", "context=3"),
            "the mesh context=3 does not work: the heads are not divisible by context",
        ),
        (
            ("wan2.1-t2v-14b", "--target", "v5e-2", "--mesh", "context=4"),
            "the mesh context=4 does not work: it has more devices than there are",
        ),
        (
            ("wan2.1-t2v-14b", "--target", "rtx4080", "--size", "1280x720", "--frames", "161"),
            "1280x720x161 with guidance does not fit rtx4080 with one device",
        ),
        (
            ("wan2.1-t2v-14b", "--target", "h200", "--frames", "80"),
            "--frames 80 cannot be built; expected 4n + 1; use 77 or 81",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli.wanbuild, ["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


@pytest.mark.slow
def test_compilers_that_are_installed_print_nothing(cli: Any) -> None:
    result = cli("wanbuild", "plan", "wan2.1-t2v-1.3b", "--target", "v7x")
    assert (result.returncode, result.stderr) == (0, "")


def test_names_of_chips() -> None:
    assert parse_chip("v7x-8") == (CHIPS["v7x"], 8)
    assert parse_chip("RTX 4090") == (CHIPS["rtx4090"], None)
    for text, count in (("v6e-w8a8", None), ("v6e-w8a8-4", 4), ("v6e-4-w8a8", 4)):
        chip, found = parse_chip(text)
        assert (chip.name, chip.kernels.w8a8, found) == ("v6e-w8a8", True, count)
    for wrong in ("v7x-", "v7x-08000", "-8", "cpu-v3"):
        with pytest.raises(UsageError):
            parse_chip(wrong)


@pytest.mark.slow
def test_arguments_are_those_that_the_compiler_records(toy_artifact: Path) -> None:
    """Weights, inputs and outputs; temporaries of compiled programs are in test_memory."""
    subject = read_subject(str(toy_artifact))
    made = make_plan(subject, PlanRequest("cpu"), {"cpu": CPU})
    (target,) = subject.manifest.targets.values()
    recorded = target.statistics[min(subject.manifest.profiles.values(), key=lambda one: one.index).name]
    for name, figures in made.chosen.figures.items():
        said = recorded[name]["argument_bytes"] + recorded[name]["output_bytes"]
        assert figures.arguments == pytest.approx(said, rel=1e-3)
