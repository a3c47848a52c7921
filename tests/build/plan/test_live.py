"""The plan of a model that makes a video chunk by chunk."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from build.plan.test_plan import CPU
from helpers.artifacts import far_toy
from wanbuild.build_options import PlanRequest
from wanbuild.plan.memory import need
from wanbuild.plan.plan import Plan, make_plan
from wanbuild.plan.plan_report import as_json, table
from wanbuild.plan.subject import read_subject
from wanrun.errors import UsageError

FRAMES = {"chunk_first": 1, "chunk": 3, "chunk_last": 2}
STEPS = 5


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return far_toy(tmp_path_factory)[1]


@pytest.fixture(scope="module")
def plan(artifact: Path) -> Plan:
    return make_plan(read_subject(str(artifact)), PlanRequest("cpu", {}, steps=STEPS), {"cpu": CPU})


@pytest.mark.slow
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
