"""Errors are one line: what, expected, found, remedy; options in them are spelled by who prints them."""

from __future__ import annotations

import pytest

from helpers.refusals import check_refusal
from wanrun.errors import (
    ArtifactError,
    Mismatch,
    SourceError,
    UsageError,
    VerificationError,
    WanError,
    artifact_mismatch,
    field,
)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "it is wrong"),
        ({"expected": 1}, "it is wrong; expected 1"),
        ({"found": None, "remedy": "mend it"}, "it is wrong; mend it"),
        ({"expected": 0, "found": "", "remedy": "mend it"}, "it is wrong; expected 0; found ; mend it"),
    ],
)
def test_the_parts_of_a_message(parts: dict[str, object], text: str) -> None:
    assert str(WanError("failed", "it is wrong", **parts)) == text  # type: ignore[arg-type]


def test_a_message_is_one_line() -> None:
    assert str(WanError("failed", "a\n b\t")) == "a b"
    assert str(WanError("failed", "a", found="c\n\n  d\t")).endswith(" c d")


def test_options_are_spelled_by_who_prints_them() -> None:
    guidance = field("guidance_scale")
    error = UsageError("no_effect", guidance, remedy=f"{field('num_steps')}, {guidance}")
    assert str(error) == "guidance_scale; num_steps, guidance_scale"
    assert error.fields == ("guidance_scale", "num_steps")
    assert error.args == (str(error),) and str(error).isprintable()  # which repr shows
    assert error.spelled(str.upper) == "GUIDANCE_SCALE; NUM_STEPS, GUIDANCE_SCALE"
    outer = UsageError("invalid_value", f"line 3: {error.text}")
    assert outer.fields == error.fields  # an error inside another's text keeps its fields


def test_the_same_error_said_of_a_line() -> None:
    error = ArtifactError("not_built", "no profile", expected="one", found="none", remedy="build it")
    located = error.located("prompts.txt, line 2")
    assert type(located) is ArtifactError and located.exit_code == 3
    assert located.parts == {**error.parts, "what": "prompts.txt, line 2: " + error.what}


def test_exit_codes() -> None:
    errors = (WanError, VerificationError, UsageError, ArtifactError, SourceError)
    assert [error.exit_code for error in errors] == [1, 1, 2, 3, 4]


def test_all_mismatches_are_in_one_error() -> None:
    two = [Mismatch("the JAX version", "1", "2", "install it"), Mismatch("the CPU", "a", "b", "move")]
    error = artifact_mismatch("target cpu", two)
    check_refusal(error, "wrong_machine", what="target cpu")
    assert error.what.endswith("; ".join(map(str, two)))
    for fact in two:
        check_refusal(
            error, "wrong_machine", what=f"{fact.what}: expected {fact.expected}, found {fact.found}"
        )
        check_refusal(error, "wrong_machine", what=fact.remedy)
