"""The table of roles: every role says all of its behaviour, and the counts of calls follow from it."""

from __future__ import annotations

import typing

import pytest
from msgspec.structs import replace

from wanrun.artifact.roles import (
    FORMS,
    LOOPS,
    ROLES,
    Counts,
    FormName,
    Role,
    RoleName,
    forms_of,
    roles_of,
)

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
