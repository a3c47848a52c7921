"""``wanbuild plan``: by formula, and with programs compiled for the CPU as if it were a chip."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from wanbuild import cli
from wanbuild.plan import plan as planning
from wanbuild.plan.compiled import Compiled, compile_programs
from wanbuild.plan.plan import PlanRequest, make_plan, parse_chip
from wanbuild.plan.prediction import BOUNDS
from wanbuild.plan.report import as_json, table
from wanbuild.plan.subject import read_subject
from wanbuild.targets.chips import CHIPS, Chip
from wanbuild.targets.target import resolve_target
from wanrun.artifact.programs import Kernels
from wanrun.errors import UsageError
from wanrun.terminal.console import run

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

OFF = {"compiles": False}


def planned(subject: str, target: str, **options: Any) -> planning.Plan:
    return make_plan(read_subject(subject), PlanRequest(target, **options), lambda line: None)


def invoked(*arguments: str) -> str:
    outcome = CliRunner().invoke(cli.wanbuild, ["plan", *arguments], catch_exceptions=False)
    assert outcome.exit_code == 0
    return outcome.output


def test_a_plan_of_a_published_model_needs_no_file() -> None:
    output = invoked("wan2.2-t2v-a14b", "--target", "v7x-8", "--no-compile")
    lines = output.splitlines()
    assert lines[0] == (
        "wan2.2-t2v-a14b, 1280x720x81 with guidance, 40 steps, on v7x-8 with data=2,context=4"
    )
    assert max(map(len, lines)) <= 110
    for start in ("encode_text", "prepare", "denoise_step", "decode_video", "memory", "video", "start"):
        assert any(line.startswith(start) for line in lines)
    assert "89% in attention" in output


def test_the_json_has_numbers_and_their_units() -> None:
    data = json.loads(
        invoked("wan2.1-i2v-14b-480p", "--target", "h200", "--no-compile", "--json", "--steps", "4")
    )
    assert data.keys() == {
        *("model", "variant", "shape", "steps", "chip", "devices", "mesh", "step_seconds", "video_seconds"),
        *("memory", "start_seconds", "download", "programs", "meshes", "rejected", "efficiency"),
    }
    assert (data["steps"], data["devices"], data["mesh"]) == (4, 1, {})
    names = ["encode_text", "encode_image", "encode_video", "prepare", "denoise_step", "decode_video"]
    assert list(data["programs"]) == names
    for program in data["programs"].values():
        terms = [program[f"{name}_seconds"] for name in BOUNDS]
        assert program["seconds"] == pytest.approx(sum(terms))
        assert program["compile_seconds"] is None
    total = sum(program["seconds"] * program["calls"] for program in data["programs"].values())
    assert data["video_seconds"] == pytest.approx(total)
    assert data["memory"]["fits"]
    assert data["download"]["weights_bytes"] == pytest.approx(46.4e9, rel=1e-2)


def test_all_meshes_are_listed_and_none_is_compiled() -> None:
    made = planned("wan2.1-t2v-14b", "v5e-8", all_meshes=True)
    assert made.compiled == {}
    assert len(made.others) == 30
    lines = table(made)
    assert sum("too much" in line for line in lines) == sum(not one.need.fits for one in made.others) > 0
    assert len(as_json(made)["meshes"]) == 30


def test_the_options_of_the_request_come_before_those_of_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "fast.toml"
    recipe.write_text(
        'source = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"\nartifact = "a"\n'
        "[convert.defaults]\nsteps = 4\nguidance_scale = 1.0\n"
        '[compile]\nsizes = ["480x832"]\nframes = [33]\nloop = "scan"\nmesh = "context=4"\n'
    )
    made = planned(str(recipe), "v5e-8", **OFF)
    shape = made.generation.shape
    assert (shape.width, shape.height, shape.num_frames, shape.guidance) == (480, 832, 33, False)
    assert (made.generation.steps, made.chosen.sizes) == (4, {"context": 4})
    assert [call.name for call in made.generation.calls][-2] == "denoise_loop"
    other = planned(str(recipe), "v5e-8", size=(832, 480), guidance=True, mesh={"data": 2}, steps=8, **OFF)
    assert (other.generation.shape.width, other.generation.shape.guidance) == (832, True)
    assert (other.generation.steps, other.chosen.sizes) == (8, {"data": 2})


def test_a_loop_takes_as_long_as_its_steps() -> None:
    step, loop = (
        planned("wan2.2-t2v-a14b", "h200", size=(832, 480), options={"loop": form}, **OFF)
        for form in ("step", "scan")
    )
    assert loop.chosen.step == pytest.approx(step.chosen.step)
    assert loop.chosen.video == pytest.approx(step.chosen.video)
    assert [call.times for call in loop.generation.calls if call.name == "denoise_loop"] == [2]


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
            ("wan2.1-t2v-14b", "--target", "v5e-8", "--mesh", "context=3"),
            "the mesh context=3 does not work: the heads are not divisible by context",
        ),
        (
            ("wan2.1-t2v-14b", "--target", "v5e-2", "--mesh", "context=4"),
            "the mesh context=4 does not work: it has more devices than there are",
        ),
        (
            ("wan2.1-t2v-14b", "--target", "rtx4080", "--no-compile", "--size", "1280x720"),
            "1280x720x81 with guidance does not fit rtx4080 with one device",
        ),
        (("wan2.1-t2v-14b", "--target", "h200", "--frames", "80"), "80 frames cannot be built"),
        (
            ("wan2.1-t2v-14b", "--target", "h200", "--program", "encode_video"),
            "there is no program 'encode_video'; expected one of encode_text, prepare, denoise_step, decode_",
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


def test_compilers_that_are_installed_print_nothing(cli: Any) -> None:
    result = cli("wanbuild", "plan", "wan2.1-t2v-1.3b", "--target", "v7x", "--no-compile")
    assert (result.returncode, result.stderr) == (0, "")


def test_names_of_chips() -> None:
    assert parse_chip("v7x-8") == (CHIPS["v7x"], 8)
    assert parse_chip("rtx4090") == (CHIPS["rtx4090"], None)
    for text, count in (("v6e-w8a8", None), ("v6e-w8a8-4", 4), ("v6e-4-w8a8", 4)):
        chip, found = parse_chip(text)
        assert (chip.name, chip.kernels.w8a8, found) == ("v6e-w8a8", True, count)
    for wrong in ("v7x-", "v7x-08000", "-8", "V7X", "h200-9"):
        with pytest.raises(UsageError):
            parse_chip(wrong)


def compiled_plan(toy_artifact: Path, chip: Chip, **options: Any) -> planning.Plan:
    return make_plan(
        read_subject(str(toy_artifact)), PlanRequest("cpu", **options), lambda line: None, {"cpu": chip}
    )


def test_compiled_programs_bring_the_compilers_figures(toy_artifact: Path) -> None:
    made = compiled_plan(toy_artifact, CPU, programs=("encode_text", "denoise_step"))
    assert list(made.compiled) == ["denoise_step", "encode_text"]
    for name, one in made.compiled.items():
        assert made.chosen.figures[name] == one.figures
        assert min(one.figures.arguments, one.figures.outputs, one.figures.temporaries) > 0
        assert one.seconds > 0
    weights = made.subject.manifest.components["text_encoder"].nbytes
    assert made.compiled["encode_text"].figures.arguments == pytest.approx(weights, rel=0.1)
    programs = as_json(made)["programs"]
    assert programs["denoise_step"]["compile_seconds"] > 0
    assert programs["decode_video"]["compile_seconds"] is None


@pytest.mark.parametrize("loop", ["step", "scan"])
def test_layers_that_stream_are_compiled_as_they_run(loop: str, toy_artifact: Path) -> None:
    """A program for each kind of layer; the tokens, which they pass on, count as temporaries of the loop.

    So it is where another form of the loop was asked for, and nothing but streaming fits.
    """
    planned = compiled_plan(toy_artifact, CPU, compiles=False, options={"loop": loop}).generation
    generation, lines = dataclasses.replace(planned, streams=True), list[str]()
    names = ("prepare", generation.loop.name)
    compiled = compile_programs(generation, resolve_target("cpu"), names, lines.append)
    made = [line.partition(" ")[0].removeprefix("stream_") for line in lines]
    assert sorted(made) == ["blocks", "context", "enter", "keys_blocks", "leave"]
    assert compiled.keys() == set(names)
    figures = compiled[generation.loop.name].figures
    one = generation.manifest.components["transformer"].nbytes
    kv = generation.beside_bytes(generation.loop.name, {})
    tokens = 2 * 3 * 4 * 6 * generation.step.config.dim * 4  # both videos, frames, rows, columns
    assert 0 < figures.arguments < one + kv and figures.temporaries > 2 * tokens and figures.outputs == 0


class Compilers:
    """Stands for compilers: programs have the figures of the formula, and more temporaries on some meshes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, more: dict[int, int]) -> None:
        self.meshes: list[Any] = []
        self.more = more
        monkeypatch.setattr(planning, "platforms_of", lambda names: "cpu")
        monkeypatch.setattr(planning, "resolve_target", lambda name, mesh: SimpleNamespace(mesh=mesh))
        monkeypatch.setattr(planning, "compile_programs", self.compile)

    def compile(self, generation: Any, target: Any, names: Any, report: Any) -> dict[str, Compiled]:
        self.meshes.append(target.mesh)
        found = planning.candidate(generation, target.mesh).figures["denoise_step"]
        more = self.more.get(len(self.meshes), 0)
        figures = dataclasses.replace(found, temporaries=found.temporaries + more)
        return {"denoise_step": Compiled("denoise_step", "step", 1.0, figures)}


def test_the_next_mesh_is_compiled_where_the_first_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    compilers = Compilers(monkeypatch, {1: 6 * 10**9})
    made = planned("wan2.1-t2v-14b", "v5e-8")
    assert len(compilers.meshes) == 2
    assert made.chosen.sizes == compilers.meshes[1] != compilers.meshes[0]
    assert [one.sizes for one in made.rejected] == [compilers.meshes[0]]
    assert not made.rejected[0].need.fits


def test_meshes_for_which_the_compiler_would_add_as_much_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiler that copies weights does so on all meshes: only those that have less of them are tried."""
    compilers = Compilers(monkeypatch, {1: 25 * 10**9})
    made = planned("wan2.1-t2v-14b", "v6e-8", size=(1280, 720))
    assert compilers.meshes[0] == {"data": 2, "context": 4}
    assert len(compilers.meshes) == 2
    assert made.chosen.sizes["fsdp"] >= 2


def test_a_named_mesh_that_the_compiler_says_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compilers = Compilers(monkeypatch, {1: 10**11})
    with pytest.raises(
        UsageError, match=r"does not fit v5e with fsdp=8; .* 1\d\d\.\d GB, .* too much; what fits: "
    ):
        planned("wan2.1-t2v-14b", "v5e-8", mesh={"fsdp": 8})
    assert compilers.meshes == [{"fsdp": 8}]


def test_a_mesh_that_is_far_too_small_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compilers = Compilers(monkeypatch, {})
    with pytest.raises(UsageError, match="--target rtx4070ti-8 --mesh data=2,fsdp=4"):
        planned("wan2.1-t2v-14b", "rtx4070ti", size=(1280, 720))
    assert compilers.meshes == []
