"""Errors are one line with a code: what, expected, found, remedy; quantities are in the unit that fits."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from helpers.refusals import check_refusal
from helpers.rules import sources_of_ours
from wanrun.codes import CODES, ErrorCode
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
from wanrun.units import in_bytes, in_hours, scaled
from wanserve.codes import SERVER_CODES, ServerCode

# --- errors ---


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


# --- codes ---


def test_every_code_has_a_meaning_and_a_use() -> None:
    for codes, names in ((CODES, get_args(ErrorCode)), (SERVER_CODES, get_args(ServerCode))):
        assert list(codes) == sorted(names)
    sources = (file.read_text(encoding="utf-8") for file in sources_of_ours() if file.name != "codes.py")
    used = set(re.findall(r'"([a-z_]+)"', "\n".join(sources)))
    assert (CODES.keys() | SERVER_CODES.keys()) - used == set()


# --- units ---


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_940, "99.9 kB"),
        (99_960, "100 kB"),
        (999_400, "999 kB"),
        (999_600, "1.00 MB"),
        (3_280_000_000, "3.28 GB"),
        (50e9, "50.0 GB"),
        (7.5e18, "7500 PB"),
    ],
)
def test_bytes(number: float, text: str) -> None:
    assert in_bytes(number) == text


def test_other_units() -> None:
    assert scaled(7.6e12, "FLOP") == "7.60 TFLOP"
    assert scaled(0.25, "B/s") == "0.25 B/s"
    assert scaled(38_400_000, "B/s") == "38.4 MB/s"


@pytest.mark.parametrize(
    ("seconds", "text"), [(1200, "20 min"), (5399, "90 min"), (9000, "2.5 h"), (39600, "11 h")]
)
def test_hours(seconds: float, text: str) -> None:
    assert in_hours(seconds) == text
