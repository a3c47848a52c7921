"""``wanbuild plan``: of a model, of one made chunk by chunk, for this machine, and the fastest settings."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from helpers.artifacts import far_toy
from helpers.refusals import check_json
from wanbuild import cli
from wanbuild.build_options import PlanRequest
from wanbuild.plan import best, here
from wanbuild.plan.best import best_settings, settings
from wanbuild.plan.here import this_machine
from wanbuild.plan.memory import need
from wanbuild.plan.plan import Plan, make_plan, parse_chip
from wanbuild.plan.plan_report import as_json, table
from wanbuild.plan.prediction import BOUNDS
from wanbuild.plan.subject import read_subject
from wanbuild.targets.chip import Chip
from wanbuild.targets.chips import CHIPS
from wancli.console import run
from wanrun.artifact.programs import Kernels
from wanrun.codes import ErrorCode
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
    ("model", "options", "code", "parts"),
    [
        ("wan9", "--target v5e", "unknown_name", {"message": "'wan9'", "expected": "a recipe (.toml)"}),
        (
            "wan2.1-t2v-14b",
            "--target tpu",
            "unknown_name",
            {"message": "'tpu'", "expected": "one of v4, v5e"},
        ),
        ("wan2.1-t2v-14b", "--target v5e-7", "unsupported", {"expected": "one of 1, 2, 4", "found": 7}),
        (
            "wan2.1-t2v-14b",
            "--target v5e --mesh context=5",
            "unsupported",
            {"expected": "one of 1, 2, 4", "found": 5},
        ),
        ("wan2.1-t2v-14b", "--target v5e-8 --mesh context=3", "mismatch", {"message": "context=3"}),
        ("wan2.1-t2v-14b", "--target v5e-2 --mesh context=4", "mismatch", {"message": "context=4"}),
        (
            "wan2.1-t2v-14b",
            "--target rtx4080 --size 1280x720 --frames 161",
            "too_large",
            {"message": ("1280x720x161", "rtx4080")},
        ),
        (
            "wan2.1-t2v-14b",
            "--target h200 --frames 80",
            "unsupported",
            {"message": "--frames 80", "expected": "4n + 1", "remedy": ("77", "81")},
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    model: str, options: str, code: ErrorCode, parts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli.wanbuild, ["plan", model, *options.split(), "--json-errors"]) == 2
    error = capsys.readouterr().err
    check_json(error, code, **parts)
    assert error.count("\n") == 1


@pytest.mark.slow
def test_compilers_that_are_installed_print_nothing(cli: Any) -> None:
    result = cli("wanbuild", "plan", "wan2.1-t2v-1.3b", "--target", "v7x")
    assert (result.returncode, result.stderr) == (0, "")


def test_names_of_chips() -> None:
    """As targets have them, with and without a number of devices; a CPU's level is none."""
    assert parse_chip("v7x-8") == (CHIPS["v7x"], 8) and parse_chip("RTX 4090") == (CHIPS["rtx4090"], None)
    chip, count = parse_chip("v6e-4-w8a8")
    assert (chip.name, chip.kernels.w8a8, count) == ("v6e-w8a8", True, 4)
    with pytest.raises(UsageError):
        parse_chip("cpu-v3")


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


# The plan of a model that makes a video chunk by chunk.


FRAMES = {"chunk_first": 1, "chunk": 3, "chunk_last": 2}
STEPS = 5


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return far_toy(tmp_path_factory)[1]


@pytest.fixture(scope="module")
def plan(artifact: Path) -> Plan:
    return make_plan(read_subject(str(artifact)), PlanRequest("cpu", {}, steps=STEPS), {"cpu": CPU})


@pytest.mark.thorough
def test_each_length_of_chunks_has_its_steps(plan: Plan) -> None:
    """Of 1, 3, 3, 3 and 2 latent frames, of which all but the last one are kept."""
    calls = {call.name: call for call in plan.generation.calls}
    assert {name: calls[name].frames for name in FRAMES} == FRAMES
    assert {name: calls[name].times for name in FRAMES} == {"chunk_first": 5, "chunk": 15, "chunk_last": 5}
    assert calls["remember"].times == 4
    seconds = {name: call.times * plan.generation.time(call, {}).seconds for name, call in calls.items()}
    assert plan.chosen.step == pytest.approx(sum(seconds[name] for name in FRAMES) / 25)
    assert plan.chosen.video == pytest.approx(sum(seconds.values()))


@pytest.mark.slow
def test_a_live_video_has_a_rate_and_a_first_chunk(plan: Plan) -> None:
    data = as_json(plan)
    each = {name: program["seconds"] for name, program in data["programs"].items()}
    later = STEPS * each["chunk"] + each["remember"] + 3 * each["decode_video"]
    assert data["live"]["frames_per_second"] == pytest.approx(12 / later)
    first = (
        each["encode_text"]
        + each["begin"]
        + each["prepare"]
        + STEPS * each["chunk_first"]
        + each["decode_first"]
    )
    assert data["live"]["first_seconds"] == pytest.approx(first)
    assert any(line.startswith("live ") for line in table(plan))


@pytest.mark.thorough
def test_a_chunk_that_is_decoded_alone_has_a_first_frame() -> None:
    """Four chunks of 9 latent frames: each is 33 frames, decoded in 9 pieces."""
    plan = make_plan(read_subject("helios-distilled"), PlanRequest("h100", {}, steps=STEPS))
    calls = {call.name: call.times for call in plan.generation.during("video")}
    assert calls == {"decode_first": 4, "decode_video": 32}
    each = {name: program["seconds"] for name, program in as_json(plan)["programs"].items()}
    later = STEPS * sum(each[name] for name in ("chunk", "chunk_half", "chunk_quarter")) + each["remember"]
    later += each["decode_first"] + 8 * each["decode_video"]
    assert as_json(plan)["live"]["frames_per_second"] == pytest.approx(33 / later)


@pytest.mark.slow
def test_what_is_kept_lies_beside_other_programs_and_is_counted_once(artifact: Path, plan: Plan) -> None:
    manifest, generation, figures = read_subject(str(artifact)).manifest, plan.generation, plan.chosen.figures
    ((recorded,),) = ([*one.statistics.values()] for one in manifest.targets.values())
    for name, one in figures.items():
        said = recorded[name]["argument_bytes"] + recorded[name]["output_bytes"]
        assert one.arguments == pytest.approx(said, rel=1e-3)
    past = generation.past_bytes("chunk")
    assert [generation.kept_bytes(name) for name in ("begin", "chunk", "remember")] == [0, 0, 0]
    assert 0 < past < generation.kept_bytes("decode_video")
    large = {**figures, "decode_video": dataclasses.replace(figures["decode_video"], temporaries=10**10)}
    assert need(generation, {}, large).working > 10**10 + past


def test_it_is_made_on_one_device(artifact: Path) -> None:
    for choices in ({}, {"mesh": {"context": 2}}, {"loop": "scan"}):
        with pytest.raises(UsageError):
            make_plan(read_subject(str(artifact)), PlanRequest("cpu-2", choices), {"cpu": CPU})


# The fastest settings for a chip: each is faster than the one before, and asked for as it says.


def planned_best(monkeypatch: pytest.MonkeyPatch, seconds: list[float | None]) -> tuple[list[Any], list[Any]]:
    """Settings for v7x-8 where plans take these seconds, or are refused; and the requests with subjects."""
    asked: list[Any] = []
    left = iter(seconds)

    def make_plan(subject: Any, request: PlanRequest) -> Any:
        asked.append((subject, request))
        if (video := next(left)) is None:
            raise UsageError("mismatch", "it does not fit")
        return SimpleNamespace(chosen=SimpleNamespace(video=video))

    monkeypatch.setattr(best, "make_plan", make_plan)
    found = best_settings(lambda quantise: quantise and quantise.form, PlanRequest("v7x-8", {"frames": 81}))  # type: ignore[arg-type, return-value]
    return [one.setting.given.split(",")[0] for one in found], asked


def test_settings_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    names, asked = planned_best(monkeypatch, [4, 3, 2, 1])
    assert names == ["as published", "--vae-dtype bfloat16", "--quantise float8", "--lora FILE"]
    assert [subject for subject, _ in asked] == [None, None, "float8", "float8"]
    assert [request.target for _, request in asked] == ["v7x-8", "v7x-8", "v7x-w8a8-8", "v7x-w8a8-8"]
    last = asked[-1][1]
    assert last.choices == {"frames": 81, "vae_dtype": "bfloat16", "guidance": False} and last.steps == 4


def test_what_is_slower_or_refused_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    names, asked = planned_best(monkeypatch, [4, 5, None, 1])
    assert names == ["as published", "--lora FILE"]
    assert asked[-1][1].target == "v7x-8" and "vae_dtype" not in asked[-1][1].choices
    with pytest.raises(UsageError, match="does not fit"):
        planned_best(monkeypatch, [None] * 4)


def test_products_of_eight_bits_are_a_setting_where_they_are_faster() -> None:
    dtypes = {name: {one.quantise for one in settings(chip)} - {None} for name, chip in CHIPS.items()}
    named = [one.given for one in settings(CHIPS["v6e"].in_eight_bits())]
    assert named == [one.given for one in settings(CHIPS["v6e"])]
    assert dtypes["v4"] == set() and dtypes["v6e"] == {"int8"} and dtypes["v7x"] == {"float8"}


@pytest.mark.thorough
def test_the_command() -> None:
    arguments = ["plan", "wan2.1-t2v-1.3b", "--target", "v6e-8", "--best"]
    lines = CliRunner().invoke(cli.wanbuild, arguments, catch_exceptions=False).output.splitlines()
    assert lines[0].startswith("wan2.1-t2v-1.3b, 832x480x81") and max(map(len, lines)) <= 110
    assert "--target v6e-w8a8" in lines[5]
    output = CliRunner().invoke(cli.wanbuild, [*arguments, "--json"], catch_exceptions=False).output
    seconds = [row["video_seconds"] for row in json.loads(output)]
    assert len(seconds) == 4 and seconds == sorted(seconds, reverse=True)


# This machine as a chip: its CPU is measured once, and planned for as any chip.


RATES = {"bfloat16": 3e11, "float32": 1.5e11, "bytes": 1e10}


@pytest.mark.slow
def test_a_cpu_is_measured_once_where_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = list[object]()
    monkeypatch.setattr(here, "_measured", lambda target: measured.append(target) or RATES)
    monkeypatch.setattr(os, "getloadavg", lambda: (1e3, 0.0, 0.0))
    this_machine("cpu")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    this_machine("cpu")
    chip, count = parse_chip("cpu")
    assert len(measured) == 2 and count is None
    assert (chip.bf16, chip.float32, chip.bandwidth, chip.counts) == (3e11, 1.5e11, 1e10, (1,))
    plan = make_plan(read_subject("wan2.1-t2v-1.3b"), PlanRequest("cpu", {"sizes": (832, 480)}))
    (video,) = [line for line in table(plan) if line.startswith("video")]
    assert " h, " in video


@pytest.mark.slow
def test_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in (("_ROWS", 64), ("_FEATURES", 64), ("_VALUES", 2**12), ("_TIMES", 1)):
        monkeypatch.setattr(here, name, few)
    chip = this_machine("cpu")
    assert min(chip.bf16, chip.float32, chip.bandwidth) > 1e6
