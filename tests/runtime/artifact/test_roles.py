"""Roles and guiders, and what a generation costs: calls, operations and bytes."""

from __future__ import annotations

import typing
from typing import get_args

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from helpers.manifests import plain_manifest, plain_program, plain_target, program_set, with_model
from helpers.media_files import task_of
from helpers.options import PROFILE, generation
from wanrun.artifact.guiders import (
    BUILT,
    GUIDERS,
    NAG_DEFAULTS,
    OWN_OPTIONS,
    SKIPPED_LAYERS,
    GuiderName,
    inputs_of,
    nag_settings,
)
from wanrun.artifact.manifest import Component
from wanrun.artifact.model import Chunking
from wanrun.artifact.programs import ProgramSet
from wanrun.artifact.roles import FORMS, LOOPS, ROLES, Counts, FormName, Role, RoleName, forms_of, roles_of
from wanrun.denoising.steps import TABLES
from wanrun.media.inputs import Inputs
from wanrun.request.generation import Generation

# --- roles ---


COUNTS = Counts(
    form="step",
    steps=10,
    guided=4,
    experts=2,
    windows=3,
    prompts=2,
    videos=4,
    media=3,
    noise=False,
    starts=True,
    past=5,
)


def test_every_role_and_form_of_a_manifest_has_a_row() -> None:
    assert ROLES.keys() == set(typing.get_args(RoleName)) and all(ROLES[name].name == name for name in ROLES)
    assert tuple(FORMS) == typing.get_args(FormName) and ("both", *FORMS, "all") == LOOPS
    in_forms = {name for form in FORMS.values() for name in form.roles}
    assert in_forms == {role.name for role in ROLES.values() if role.when in ("expert", "steps")}


@pytest.mark.parametrize("field", Role.__struct_fields__)
def test_nothing_of_a_role_can_be_forgotten(field: str) -> None:
    row = {name: getattr(ROLES["step"], name) for name in Role.__struct_fields__}
    del row[field]
    with pytest.raises(TypeError, match=f"'{field}'"):
        Role(**row)


def test_a_program_that_makes_steps_is_proven_by_their_update() -> None:
    for name, proven in (("step", "record"), ("decode", "update")):
        with pytest.raises(ValueError, match=r"\bupdate\b"):
            replace(ROLES[name], proven=proven)


CALLS = {"text": 2, "once": 1, "window": 3, "start": 1, "past": 5, "decode_first": 12, "decode": 12}


@pytest.mark.parametrize(
    ("form", "noise", "expected"),
    [
        ("step", False, {"prepare": 6, "step": 30}),
        ("step", True, {"prepare": 6, "step": 30}),
        ("scan", False, {"prepare": 6, "scan": 6}),
        ("scan", True, {"prepare": 6, "scan": 30}),
        ("stream", False, {"context": 6, "enter": 30, "keys": 6, "layer": 30, "leave": 30}),
    ],
)
def test_calls_and_cost(form: str, noise: bool, expected: dict[str, int]) -> None:
    counts = replace(COUNTS, form=form, noise=noise)
    calls = {role.name: role.calls(counts) for role in roles_of(form)}
    assert calls == CALLS | expected
    # Of a loop the compiler counts one step, and of a step with guidance one pass.
    steps = {"step": 30, "scan": 30, "layer": 30}
    for together, passes in ((False, 42), (True, 30)):
        counted = dict.fromkeys(steps.keys() & calls.keys(), passes)
        assert {role.name: role.cost(counts, together) for role in roles_of(form)} == calls | counted
    third = replace(counts, skipping=2)
    extra = {role.name: role.cost(third) - role.cost(counts) for role in roles_of(form)}
    assert extra == dict.fromkeys(extra, 0) | dict.fromkeys(steps.keys() & calls.keys(), 6)
    tiny = {role.name: role.calls(replace(counts, decoder="tiny")) for role in roles_of(form, "tiny")}
    del calls["decode_first"]
    assert tiny == {key.replace("decode", "decode_tiny"): value for key, value in calls.items()}
    of_text = replace(counts, media=0)
    assert [role.calls(of_text) for role in roles_of(form) if role.when == "media"] == [0, 0, 1, 5]


def test_calls_of_chunks() -> None:
    counts = replace(COUNTS, form="chunks", windows=1, experts=1, chunks=(1, 3, 3, 2))
    calls = {role.name: role.calls(counts) for role in roles_of("chunks")}
    assert [calls[name] for name in FORMS["chunks"].roles] == [1, 1, 40, 3]
    assert counts.told_steps == 40 and ROLES["chunk"].calls(counts.of_chunks(3)) == 20
    alone = {role.name: role.calls(replace(counts, decoded=4)) for role in roles_of("chunks")}
    assert alone == calls | {"decode_first": 4 * calls["decode_first"], "decode": 4 * calls["decode"]}


def test_what_an_ended_run_has_left() -> None:
    one, two = (replace(COUNTS, media=2).after(parts) for parts in (1, 2))
    assert [(left.windows, left.media, left.told_steps) for left in (one, two)] == [(2, 2, 20), (1, 1, 10)]
    blended = replace(COUNTS, blended=9, media=0)
    assert (blended.after(0).told_steps, blended.after(1).told_steps) == (10, 0)
    calls = {role.name: role.calls(blended.after(2)) for role in roles_of("step")}
    assert (calls["prepare"], calls["step"], calls["decode"]) == (0, 0, 12)


def test_of_several_programs_that_make_steps_the_last_one_that_wants_a_step_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from wanrun.artifact import roles

    every_third = replace(
        ROLES["step"],
        name="leave",
        makes=lambda index: index % 3 == 2,
        calls=lambda counts: counts.made("leave"),
    )
    form = replace(FORMS["step"], roles=("prepare", "step", "leave"))
    monkeypatch.setattr(roles, "ROLES", {**ROLES, "leave": every_third})
    monkeypatch.setattr(roles, "FORMS", {**FORMS, "step": form})
    assert form.makers == ("step", "leave") and not form.looped
    assert [form.maker(index) for index in range(4)] == ["step", "step", "leave", "step"]
    assert ROLES["step"].calls(COUNTS) == 3 * 7 and every_third.calls(COUNTS) == 3 * 3


def test_the_forms_of_a_choice() -> None:
    assert forms_of("both") == ("step", "scan") and forms_of("all") == ("step", "scan", "stream")
    assert forms_of("scan") == ("scan",) and forms_of("chunks") == ("chunks",)
    assert [FORMS[name].looped for name in FORMS] == [False, True, False, False]


# --- cost ---


def test_the_cost_of_text_alone() -> None:
    pair = msgspec.structs.replace(PROFILE, num_videos=2)
    cost = generation(profile=pair, num_videos=2, num_steps=4).cost()
    assert (cost.windows, cost.steps, cost.frames, cost.pixels) == (1, 4, 18, 18 * 96 * 64)
    media = dict.fromkeys(("once", "window", "start", "past"), 0)
    assert cost.calls == {"text": 2, **media, "prepare": 1, "step": 4, "decode": 2}
    assert cost.flops == cost.bytes == {}  # nothing was compiled
    scan = generation(num_steps=4, loop="scan").cost().calls
    assert scan["scan"] == 1 and "step" not in scan
    # Noise is added between the calls.
    assert generation(num_steps=4, loop="scan", solver="lcm").cost().calls["scan"] == 4


def test_the_cost_of_a_long_video() -> None:
    animate = with_model(plain_manifest(), task=task_of("wan2.2-animate", encoder=False))

    def given() -> Generation:
        return generation(animate, num_steps=3, image="i.png", pose_video="p", face_video="f")

    unread = given().cost()
    assert unread.windows is None and unread.steps == 3
    cost = given().cost(Inputs(num_frames=33))
    assert (cost.windows, cost.steps, cost.frames) == (4, 12, 33)
    assert (cost.calls["step"], cost.calls["decode"], cost.calls["once"]) == (12, 4, 1)


def test_each_part_of_a_past_is_encoded() -> None:
    """A first frame, and chunks of 33 frames: of a video three at most, or as many as were read."""
    chunks = Chunking(first=9, each=9, alone=True)
    helios = with_model(plain_manifest(), task=task_of("helios-wan2.1"), chunks=chunks)
    given = [generation(helios, **one).cost().calls for one in ({}, {"image": "i.png"}, {"video": "v.mp4"})]
    assert [(calls["past"], calls["window"]) for calls in given] == [(0, 0), (2, 0), (4, 0)]
    for frames, calls in ((1, 2), (1 + 2 * 33, 3)):
        read = Inputs({"given": np.zeros((frames, 1)), "given_frames": np.array(99, np.int32)})
        assert generation(helios).cost(read).calls["past"] == calls


def test_the_cost_of_blended_windows() -> None:
    """They share what an expert prepares, and a decoder with a state makes their video at once."""

    def built(donate: tuple[int, ...]) -> ProgramSet:
        avals = {"inputs": {"latents": "float32[16,3,8,12]"}}
        decode = plain_program(role="decode", inputs=("latents", "past"), avals=avals, donate=donate)
        others = {role: plain_program(role=role) for role in ("text", "prepare", "step")}
        made = program_set({PROFILE.name: {**others, "decode": decode}})
        return msgspec.structs.replace(made, mesh={} if donate else {"data": 2})

    sets = {"piecewise": built((1,)), "whole": built(())}
    figures = dict.fromkeys(("argument_bytes", "output_bytes", "temporary_bytes", "code_bytes", "flops"), 1)
    statistics = {PROFILE.name: dict.fromkeys(("text", "prepare", "step", "decode"), figures)}
    manifest = plain_manifest(
        components={"transformer": Component("transformer", {})},
        profiles={PROFILE.name: PROFILE},
        program_sets={one.key: one for one in sets.values()},
        targets={
            name: plain_target(program_set=one.key, statistics=statistics) for name, one in sets.items()
        },
    )
    blended = generation(manifest, num_steps=2, num_frames=33, window_frames=9, guidance_scale=1.0)
    steps = {"prompts": 1, "expert": 1, "steps": 8}
    assert blended.cost().parts == {"piecewise": {**steps, "video": 3}, "whole": {**steps, "video": 4}}
    assert blended.counts().told_steps == 2 and blended.cost().bytes == dict.fromkeys(sets, 4)
    scan = generation(manifest, num_steps=2, num_frames=33, window_frames=9, loop="scan").cost().calls
    assert scan["scan"] == 8  # the windows are blended after each step


def test_a_clip_after_one_of_text_alone_begins_with_an_image() -> None:
    held = with_model(plain_manifest(), task=task_of("wan2.2-ti2v", encoder=False))
    assert generation(held, clips=3).cost().calls["window"] == 2
    assert generation(held, clips=3, image="i.png").cost().calls["window"] == 3


# --- guiders ---


def test_every_guider_has_its_row_and_its_input_a_table() -> None:
    assert tuple(GUIDERS) == get_args(GuiderName)
    assert "cfg" not in BUILT and len(BUILT) == len(GUIDERS) - 1
    inputs = [name for one in GUIDERS.values() for name in one.inputs]
    assert TABLES.keys() > {*inputs} and len(set(inputs)) == len(inputs) and len(OWN_OPTIONS) == 5
    assert inputs_of(BUILT, 7) == {**dict.fromkeys(inputs, ()), SKIPPED_LAYERS: (7,)}


# --- nag ---


def test_options_are_in_their_order_and_off_by_default() -> None:
    assert nag_settings({}).tolist() == [1, 2.5, 0.25] and nag_settings({}).dtype == "float32"
    given = dict(zip(reversed(list(NAG_DEFAULTS)), (0.5, 3, 11), strict=True))
    assert nag_settings(given).tolist() == [11, 3, 0.5]
